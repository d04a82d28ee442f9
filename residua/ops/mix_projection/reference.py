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

    current, anchor [B, T, H, D]; scales broadcast against them ([], [H, 1], [H, D], or per token [B, T, 1, 1] …).
    N is RMS over D with gain `norm_weight` [D] when that is given, the identity otherwise.
    """
    source = wide(anchor) if norm_weight is None else rms(wide(anchor), eps, norm_weight)
    return (anchor_scale * source + current_scale * wide(current)).to(current.dtype)
