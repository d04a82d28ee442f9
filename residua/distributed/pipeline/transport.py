"""Which tensors are sent between pipeline stages, and how a rank caches those that its later stages need.

Naive: every tensor is sent across each stage boundary that it crosses. Cached (Attention Residuals, arXiv 2603.15031):
a rank with several stages caches the tensors it receives or computes, and receives only those that it lacks. With P
ranks of V stages each and N_p blocks computed per stage, in blocks per token and direction,

    naive    PV(PV−1)/2 · N_p
    cached   P(P−1)/2 · N_p + (V−1) P² · N_p         in the paper; we also cache the rank's own blocks, so our
                                                     second term is (V−1) P(P−1) · N_p

The cache holds the tensor itself, not a copy. In the backward pass, later stages of the rank add their gradients to the
cache entry. The stage that received or computed the tensor adds their sum to its own gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Route:
    """The tensors of one stage, by name: received, read from its rank's cache, put into the cache, and sent on.

    `to_cache` gives the number of later stages of the rank that will read each tensor.
    """

    receives: tuple[str, ...] = ()
    from_cache: tuple[str, ...] = ()
    to_cache: dict[str, int] = field(default_factory=dict)
    sends: tuple[str, ...] = ()


def plan_routes(boundaries: Sequence[Sequence[str]], ranks: int, transport: str) -> list[Route]:
    """The routes of all stages, assigned to ranks round-robin; `boundaries` are the names that cross each boundary."""
    stages = len(boundaries) + 1
    origins: list[dict[str, int]] = [{} for _ in range(ranks)]
    """For each rank, the stage that first received or computed a tensor."""
    receives: list[tuple[str, ...]] = [()]
    from_cache: list[tuple[str, ...]] = [()]
    to_cache: list[dict[str, int]] = [{} for _ in range(stages)]
    for stage in range(1, stages):
        names, known = boundaries[stage - 1], origins[stage % ranks]
        for name in names:
            origins[(stage - 1) % ranks].setdefault(name, stage - 1)
        cached = tuple(name for name in names if name in known) if transport == "cached" else ()
        for name in cached:
            to_cache[known[name]][name] = to_cache[known[name]].get(name, 0) + 1
        receives.append(tuple(name for name in names if name not in cached))
        from_cache.append(cached)
        for name in names:
            known.setdefault(name, stage)
    sends = [*receives[1:], ()]
    return [Route(*parts) for parts in zip(receives, from_cache, to_cache, sends, strict=True)]


def naive_blocks(ranks: int, stages_per_rank: int, blocks_per_stage: float) -> float:
    """PV(PV−1)/2 · N_p."""
    stages = ranks * stages_per_rank
    return stages * (stages - 1) / 2 * blocks_per_stage


def cached_blocks(ranks: int, stages_per_rank: int, blocks_per_stage: float) -> float:
    """P(P−1)/2 · N_p + (V−1) P² · N_p."""
    return (ranks * (ranks - 1) / 2 + (stages_per_rank - 1) * ranks**2) * blocks_per_stage


@dataclass
class Entry:
    """A cached tensor, the number of stages that will still read it, and the sum of their gradients."""

    value: Tensor | None
    readers: int
    gradient: Tensor | None = None

    def take_gradient(self, leaf: Tensor) -> None:
        """Add the gradient of a stage and take ownership of it; a stage that did not read the tensor has none."""
        if leaf.grad is None:
            return
        self.gradient = leaf.grad if self.gradient is None else self.gradient + leaf.grad
        leaf.grad = None


class StageCache:
    """The tensors that a rank caches for its later stages, by micro-batch and name; freed after the last reader."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], Entry] = {}

    def put(self, batch: int, name: str, value: Tensor, readers: int) -> Tensor:
        """Cache a value that `readers` later stages will read; use the returned tensor in its place."""
        entry = self.entries[batch, name] = Entry(value.detach(), readers)
        cached: Tensor = _Put.apply(value, entry) if value.requires_grad else value
        return cached

    def get(self, batch: int, name: str) -> Tensor:
        """A cached value as the leaf of a new autograd graph; its gradient goes to the cache entry."""
        entry = self.entries[batch, name]
        assert entry.value is not None
        value = entry.value.detach()
        entry.readers -= 1
        if entry.readers == 0:
            entry.value = None
            del self.entries[batch, name]
        if torch.is_grad_enabled():
            value.requires_grad_()
            value.register_post_accumulate_grad_hook(entry.take_gradient)
        return value


class _Put(torch.autograd.Function):
    """x in the forward pass; the backward pass adds the gradients of the later stages, whose backward ran earlier."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        later, ctx.entry.gradient = ctx.entry.gradient, None
        return (gradient if later is None else gradient + later), None


class _WithLoss(torch.autograd.Function):
    """x in the forward pass; in the backward pass the loss gets the gradient 1, as if it were added to the step's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def with_loss(x: Tensor, loss: Tensor | None) -> Tensor:
    """x; its backward pass also runs that of this stage's own loss, if there is one."""
    carrying: Tensor = x if loss is None else _WithLoss.apply(x, loss)
    return carrying


class _Hold(torch.autograd.Function):
    """x in the forward pass; the backward pass also reaches the other tensors, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * ctx.count


def hold(x: Tensor, tensors: Iterable[Tensor]) -> Tensor:
    """x, with all of `tensors` in its backward pass.

    A cached tensor that this stage does not read then still passes on the gradients of later stages.
    """
    received = [t for t in tensors if t.requires_grad]
    holding: Tensor = _Hold.apply(x, *received) if received and x.requires_grad else x
    return holding


def hop_bytes(boundaries: Sequence[dict[str, Tensor]], routes: Sequence[Route]) -> list[int]:
    """The bytes that one micro-batch sends over each hop in one direction."""
    return [
        sum(items[name].numel() * items[name].element_size() for name in route.sends)
        for items, route in zip(boundaries, routes, strict=False)
    ]


def mib(size: float) -> str:
    """A human-readable size."""
    return f"{size / 2**20:.3g} MiB"
