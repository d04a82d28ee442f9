"""Momentum and descent over lists of tensors, by PyTorch's own list operations."""

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


def cautious_descent(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float, decay: float) -> None:
    """x ← x − rate·u − decay·1[u⊙x ≥ 0]⊙x in place, the mask taken before the weight moves (arXiv 2510.12402)."""
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
