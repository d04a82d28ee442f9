"""Projection mixing in plain PyTorch (ExoFormer, arXiv 2601.08131)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from residua.ops._runtime.numeric import rms, wide
from residua.ops.norm_rotate.reference import rotate

Sections = Mapping[str, tuple[int, int]]
"""Pathway name to (heads, width of a head), in the order of the projection's columns."""

Heads = dict[str, Tensor]
"""Pathway name to [B, T, heads, width]."""


def mix_projection(
    current: Tensor,
    anchor: Tensor,
    current_scale: Tensor,
    anchor_scale: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Mix a layer's projection with the anchor's.

        Ŝ = anchor_scale ⊙ N(S_anc) + current_scale ⊙ S

    current, anchor [B, T, H, D]; scales are one number [], one per head [H], one per element [H, D], or anything of two
    axes or more that broadcasts, such as per token [B, T, 1, 1].
    N is RMS over D with gain `norm_weight` [D] if given, otherwise the identity.
    """
    source = wide(anchor) if norm_weight is None else rms(wide(anchor), eps, norm_weight)
    return (per_head(anchor_scale) * source + per_head(current_scale) * wide(current)).to(current.dtype)


def mix_heads(
    projected: Tensor,
    sections: Sections,
    anchors: Mapping[str, Tensor],
    anchor_scales: Mapping[str, Tensor],
    current_scales: Mapping[str, Tensor],
    table: tuple[Tensor, Tensor],
    *,
    gains: tuple[Tensor, Tensor] | None = None,
    gamma: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Heads, tuple[Tensor, ...]]:
    """Turn an attention layer's fused projection into its heads: split, mix, QK-norm, rotate.

        Ŝ = λ1 γ1 ⊙ S_anc + λ2 γ2 ⊙ S  for each S of anchors,   Q, K = rotate(gain ⊙ RMS(·))

    projected [B, T, R]; anchors [B, T, H, D], already normalised; scales λ1 and λ2 as in `mix_projection`, not per
    token; table: cos and sin [T, D/2]; gains [D] of Q and K, None for no norm; gamma [B, T, 2·anchors], γ1 and γ2 of
    each anchor in turn, None for 1. Returns the heads by name, and the anchors for the next layer.
    """
    parts = projected.split([heads * width for heads, width in sections.values()], -1)
    heads = {s: part.unflatten(-1, sections[s]) for s, part in zip(sections, parts, strict=True)}
    factors = None if gamma is None else gamma[..., None, None].unbind(-3)
    for i, (s, anchor) in enumerate(anchors.items()):
        l1, l2 = per_head(anchor_scales[s]), per_head(current_scales[s])
        if factors is not None:
            l1, l2 = l1 * factors[2 * i], l2 * factors[2 * i + 1]
        heads[s] = mix_projection(heads[s], anchor, l2, l1)
    for s, gain in zip("qk", gains or (None, None), strict=True):
        heads[s] = rotate(heads[s] if gain is None else rms(heads[s], eps, gain), table)
    return heads, tuple(anchors.values())


def factors(hidden: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    """γ = σ(GELU(h) W2 + b) [..., F], one factor for each λ, from h [..., E]; up [F, E] is W2ᵀ, bias [F]."""
    return torch.sigmoid(linear(gelu(hidden), up.to(hidden.dtype)) + bias.to(hidden.dtype))


class Mixing(NamedTuple):
    """V̂ = λ1 ⊙ V_anc + λ2 ⊙ V: the anchor [..., H_kv, D], λ1 and λ2 [H_kv, D] with the same strides."""

    anchor: Tensor
    anchor_scale: Tensor
    scale: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        """V̂, in at least float32."""
        return wide(self.anchor_scale) * wide(self.anchor) + wide(self.scale) * wide(v)


def per_head(scale: Tensor) -> Tensor:
    """[H] as [H, 1], to broadcast over head_dim; other shapes unchanged."""
    return scale[:, None] if scale.dim() == 1 else scale
