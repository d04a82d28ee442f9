"""A matrix times its own transpose, by PyTorch's batched product."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_product(
    x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """S = αXXᵀ + βC + γI [B, m, m] for every matrix of a stack x [B, m, k] and symmetric c [B, m, m].

    The fused path has no gradient; it computes half of S and mirrors it.
    """
    if c is not None:
        s = torch.baddbmm(c, x, x.mT, beta=beta, alpha=alpha)
    else:
        s = torch.bmm(x, x.mT)
        s = s if alpha == 1 else s * alpha
    if gamma:
        s.diagonal(dim1=-2, dim2=-1).add_(gamma)
    return s
