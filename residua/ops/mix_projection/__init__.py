"""Mixing of a layer's projections with anchor projections.

A step of S with ExoFormer takes 1.052 times one with gated attention, 1.071 when each layer adds its own anchor
gradients (docs/lab/goals.md). To time it: `residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare
"gated_attention model.ffn.hidden=2688,exoformer model.ffn.hidden=2560"`. Over compiled PyTorch: not measured alone,
`residua bench ops mix_heads --implementations fused,compiled`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.mix_projection import autograd, reference
from residua.ops.mix_projection.reference import Heads, Sections, per_head

WIDEST_HEAD = 4096


def _serves(
    current: Tensor, anchor: Tensor, current_scale: Tensor, anchor_scale: Tensor, *,
    norm_weight: Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    """Supports scales that are the same for every token."""
    scales = (current_scale, anchor_scale)
    static = all(scale.dim() <= 2 for scale in scales) and current.shape == anchor.shape
    gain = () if norm_weight is None else (norm_weight,)
    return static and current.shape[-1] <= WIDEST_HEAD and supports(current, anchor, *scales, *gain)


def _serves_heads(projected: Tensor, sections: Sections, anchors: Mapping[str, Tensor], *_: Any, **__: Any) -> bool:
    """Supports heads that fit into a tile."""
    widest = max(width for _, width in sections.values())
    return widest <= WIDEST_HEAD and supports(projected, *anchors.values())


def _mixtures(d: Draw) -> Cases:
    shape = d.sizes.heads, d.sizes.head_dim
    yield Case((d.heads(), d.heads(), d.w(*shape), d.w(*shape)), {"norm_weight": d.w(shape[1])}, moved=(3, 5))


def _layers(d: Draw) -> Cases:
    """Everything an ExoFormer layer does between its projection and its attention."""
    sections = dict.fromkeys("qkvg", (d.sizes.heads, d.sizes.head_dim))
    anchors = {s: d.heads() for s in sections}
    scales = [{s: d.w(*shape) for s, shape in sections.items()} for _ in range(2)]
    projected, gains = d.x(*d.sizes.batch, 4 * d.sizes.width), (d.w(d.sizes.head_dim), d.w(d.sizes.head_dim))
    args = (projected, sections, anchors, *scales, d.table)
    yield Case(args, {"gains": gains}, fixed=d.table, moved=(4 * 3, 4 * 5))


mix_projection = Operator(reference.mix_projection, _mixtures, autograd.mix_projection, _serves)
mix_heads = Operator(reference.mix_heads, _layers, autograd.mix_heads, _serves_heads)

__all__ = ["Heads", "Sections", "mix_heads", "mix_projection", "per_head"]
