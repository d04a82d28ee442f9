"""Momentum and descent over lists of tensors, with PyTorch's list operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def momentum_directions(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> list[Tensor]:
    """m ← βm + (1−β)g in place; returns Nesterov's βm + (1−β)g in `dtype`."""
    torch._foreach_lerp_(list(momenta), list(gradients), 1 - beta)
    return [direction.to(dtype) for direction in torch._foreach_lerp(list(gradients), list(momenta), beta)]


def adam_directions(
    means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor], betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:  # fmt: skip
    """m ← β₁m + (1−β₁)g and v ← β₂v + (1−β₂)g² in place; returns m/(√v + eps)."""
    means, squares, gradients = list(means), list(squares), list(gradients)
    torch._foreach_lerp_(means, gradients, 1 - betas[0])
    torch._foreach_mul_(squares, betas[1])
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - betas[1])
    scales = torch._foreach_sqrt(squares)
    torch._foreach_add_(scales, eps)
    return list(torch._foreach_div(means, scales))


def cautious_descent(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float, decay: float) -> None:
    """x ← x − rate·u − decay·1[u⊙x ≥ 0]⊙x in place, with the mask from before the update (arXiv 2510.12402)."""
    weights = list(weights)
    updates = [update.to(weight.dtype) for weight, update in zip(weights, updates, strict=True)]
    if decay:
        mask = torch._foreach_mul(weights, updates)
        torch._foreach_sign_(mask)
        torch._foreach_add_(mask, 1.0)
        torch._foreach_clamp_max_(mask, 1.0)
        torch._foreach_addcmul_(weights, weights, mask, value=-decay)
    torch._foreach_add_(weights, updates, alpha=-rate)


def plain_descent(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float, decay: float) -> None:
    """x ← x − rate·u − decay·x in place (AdamW's decoupled decay, arXiv 1711.05101)."""
    weights = list(weights)
    updates = [update.to(weight.dtype) for weight, update in zip(weights, updates, strict=True)]
    if decay:
        torch._foreach_mul_(weights, 1 - decay)
    torch._foreach_add_(weights, updates, alpha=-rate)
