"""Mixing of a layer's projections with anchor projections."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.mix_projection import reference
from residua.ops.mix_projection.reference import Heads, Sections, per_head

WIDEST_HEAD = 4096


def _serves(
    current: Tensor, anchor: Tensor, current_scale: Tensor, anchor_scale: Tensor, *,
    norm_weight: Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    """Scales that are the same for every token."""
    scales = (current_scale, anchor_scale)
    static = all(scale.dim() <= 2 for scale in scales) and current.shape == anchor.shape
    gain = () if norm_weight is None else (norm_weight,)
    return static and current.shape[-1] <= WIDEST_HEAD and fused.serves(current, anchor, *scales, *gain)


def _serves_heads(projected: Tensor, sections: Sections, anchors: Mapping[str, Tensor], *_: Any, **__: Any) -> bool:
    """Heads that fit into a tile."""
    widest = max(width for _, width in sections.values())
    return widest <= WIDEST_HEAD and fused.serves(projected, *anchors.values())


mix_projection = Operator(reference.mix_projection)
mix_heads = Operator(reference.mix_heads)

if fused.INSTALLED:
    from residua.ops.mix_projection import autograd

    mix_projection.register_fused(autograd.mix_projection, _serves)
    mix_heads.register_fused(autograd.mix_heads, _serves_heads)

__all__ = ["Heads", "Sections", "mix_heads", "mix_projection", "per_head"]
