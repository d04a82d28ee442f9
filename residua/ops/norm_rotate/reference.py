"""QK-norm and rotary positions in plain PyTorch (arXiv 2010.04245, 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.numeric import rms


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Normalise every head, then rotate it by its position: rotate(weight ⊙ RMS(x)).

    x [B, T, H, D], RMS over D; weight [D]; cos, sin [T, D/2] or, per row, [B, T, D/2]. Returns [B, T, H, D].
    """
    return rotate(rms(x, eps, weight), (cos, sin))


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i+D/2}) of x [B, T, H, D] by their position's angles.

    The table is cos and sin, [T, D/2] or [B, T, D/2].
    """
    cos, sin = (t[..., None, :].to(x.dtype if x.dtype == torch.float64 else torch.float32) for t in table)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
