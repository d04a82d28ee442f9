"""The order of tokens' copies when sorted by expert, and the way back for their results.

A token that visits k experts has k slots. Sorting is stable, and both directions are gathers, forward and backward.
Without atomic additions, the same input gives the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """The N·k slots of N tokens, sorted by expert.

    order: [N·k], the token-major slot (token · k + choice) at each sorted position; place: its inverse; ends: [E],
    where each expert's run ends; choices: k.
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    choices: int


def sort_slots(chosen: Tensor, experts: int) -> Slots:
    """Sort the slots of `chosen` [N, k], the experts that each token visits."""
    runs, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(runs, torch.arange(experts, device=runs.device), right=True)
    return slots_of(order, ends.to(torch.int32), chosen.shape[1])


def slots_of(order: Tensor, ends: Tensor, choices: int) -> Slots:
    """The slots for a given order of the rows; `choices` is k."""
    order = order.long()
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    return Slots(order, place, ends, choices)


def dispatch(x: Tensor, slots: Slots) -> Tensor:
    """The rows x [N, C] of the tokens, one per slot in sorted order: [N·k, C]."""
    return _gather(x, slots.order, slots.place, slots.choices)


def combine(y: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """Σ over a token's slots of weight · result: y [N·k, C] in sorted order, weights [N, k]; returns [N, C]."""
    back = _gather(y, slots.place, slots.order, 1)
    return (back.unflatten(0, weights.shape) * weights[..., None].to(y.dtype)).sum(1)


def _gather(x: Tensor, order: Tensor, place: Tensor, choices: int) -> Tensor:
    rows: Tensor = _Gather.apply(x, order, place, choices)
    return rows


class _Gather(torch.autograd.Function):
    """x[order // choices]; `place` is the inverse of `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.choices = choices
        return x[order if choices == 1 else order // choices]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        rows = gradients[0][place]
        if ctx.choices > 1:
            rows = rows.unflatten(0, (-1, ctx.choices)).sum(1)
        return rows, None, None, None
