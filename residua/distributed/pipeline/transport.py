"""Which tensors are sent between pipeline stages, and how a rank caches those that its later stages need.

Naive: every tensor that crosses a stage boundary is sent there. Cached (Attention Residuals, arXiv 2603.15031): a rank
with several stages caches what it received or made, and is sent only what it does not have. With P ranks of V stages
each and N_p blocks made per stage, in blocks per token and direction,

    naive    PV(PV−1)/2 · N_p
    cached   P(P−1)/2 · N_p + (V−1) P² · N_p         in the paper; we also cache what the rank made itself, so our
                                                     second term is (V−1) P(P−1) · N_p

The cache holds the tensor that was received or made, not a copy. In the backward pass the later stages of the rank add
their gradients to the cache entry, and the stage that received or made the tensor adds their sum to its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Route:
    """What one stage is sent, takes from its rank's boxes, puts there for how many later readers, and sends on."""

    receives: tuple[str, ...] = ()
    borrows: tuple[str, ...] = ()
    lends: dict[str, int] = field(default_factory=dict)
    sends: tuple[str, ...] = ()


def plan_routes(cuts: Sequence[Sequence[str]], ranks: int, transport: str) -> list[Route]:
    """The routes of len(cuts) + 1 stages, dealt out to the ranks in turn; `cuts` are the names that cross each cut."""
    stages = len(cuts) + 1
    brought: list[dict[str, int]] = [{} for _ in range(ranks)]
    """For each rank, the stage that first had a tensor there."""
    receives: list[tuple[str, ...]] = [()]
    borrows: list[tuple[str, ...]] = [()]
    lends: list[dict[str, int]] = [{} for _ in range(stages)]
    for stage in range(1, stages):
        names, known = cuts[stage - 1], brought[stage % ranks]
        for name in names:
            brought[(stage - 1) % ranks].setdefault(name, stage - 1)
        kept = tuple(name for name in names if name in known) if transport == "cached" else ()
        for name in kept:
            lends[known[name]][name] = lends[known[name]].get(name, 0) + 1
        receives.append(tuple(name for name in names if name not in kept))
        borrows.append(kept)
        for name in names:
            known.setdefault(name, stage)
    sends = [*receives[1:], ()]
    return [Route(*parts) for parts in zip(receives, borrows, lends, sends, strict=True)]


def naive_blocks(ranks: int, stages_per_rank: int, blocks_per_stage: float) -> float:
    """PV(PV−1)/2 · N_p."""
    stages = ranks * stages_per_rank
    return stages * (stages - 1) / 2 * blocks_per_stage


def cached_blocks(ranks: int, stages_per_rank: int, blocks_per_stage: float) -> float:
    """P(P−1)/2 · N_p + (V−1) P² · N_p."""
    return (ranks * (ranks - 1) / 2 + (stages_per_rank - 1) * ranks**2) * blocks_per_stage


class Box:
    """A tensor that a rank keeps for the later stages it holds, and the gradient they leave for it."""

    def __init__(self, value: Tensor, readers: int) -> None:
        self.value: Tensor | None = value
        self.readers = readers
        self.gradient: Tensor | None = None

    def leave(self, gradient: Tensor) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient


class Shelf:
    """The boxes of one rank, by micro-batch and name. A value is let go with its last reader."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, str], Box] = {}

    def lend(self, batch: int, name: str, value: Tensor, readers: int) -> Tensor:
        """Keep a value for `readers`; what is returned is to be used in its place."""
        box = self.boxes[batch, name] = Box(value.detach(), readers)
        lent: Tensor = _Lend.apply(value, box) if value.requires_grad else value
        return lent

    def borrow(self, batch: int, name: str) -> Tensor:
        """A kept value as the begin of a graph of its own; its gradient goes into the box."""
        box = self.boxes[batch, name]
        assert box.value is not None
        value = box.value.detach()
        box.readers -= 1
        if box.readers == 0:
            box.value = None
            del self.boxes[batch, name]
        if torch.is_grad_enabled():
            value.requires_grad_()
            value.register_post_accumulate_grad_hook(lambda leaf: _return(leaf, box))
        return value


def _return(leaf: Tensor, box: Box) -> None:
    assert leaf.grad is not None
    box.leave(leaf.grad)
    leaf.grad = None


class _Lend(torch.autograd.Function):
    """x in the forward pass; the backward pass adds the gradients of the later stages, which have run before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: Box) -> Tensor:
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        left, ctx.box.gradient = ctx.box.gradient, None
        return (gradient if left is None else gradient + left), None


class _Hold(torch.autograd.Function):
    """x in the forward pass; zero gradients for the other tensors in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *held: Tensor) -> Tensor:
        ctx.shapes = [(t.shape, t.dtype) for t in held]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = [gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes]
        return gradient, *zeros


def hold(x: Tensor, held: Sequence[Tensor]) -> Tensor:
    """x, with every tensor of `held` in its backward pass. Received tensors always get a gradient, possibly zero."""
    owed = [t for t in held if t.requires_grad]
    kept: Tensor = _Hold.apply(x, *owed) if owed and x.requires_grad else x
    return kept
