"""Projection mixing in plain PyTorch (ExoFormer, arXiv 2601.08131)."""

from __future__ import annotations

from torch import Tensor

from residua.ops.numeric import rms, wide


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
    N is RMS over D with gain `norm_weight` [D] when that is given, the identity otherwise.
    """
    source = wide(anchor) if norm_weight is None else rms(wide(anchor), eps, norm_weight)
    return (per_head(anchor_scale) * source + per_head(current_scale) * wide(current)).to(current.dtype)


def per_head(scale: Tensor) -> Tensor:
    """[H] as [H, 1], to broadcast over head_dim; other shapes as they are."""
    return scale[:, None] if scale.dim() == 1 else scale
