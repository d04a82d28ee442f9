"""Contexts in which a topology reads otherwise, shared by the families that support them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from residua import ops
from residua.model import taps

if TYPE_CHECKING:
    from residua.model.topology.base import State, Topology

Change = Callable[[int, Tensor, dict[str, Tensor]], Tensor]
"""Turns the read after sublayer k, and what was tapped there, into the read to continue with."""


@contextmanager
def sources_dropped(reads: Sequence[nn.Module], positions: Mapping[int, Collection[int]]) -> Iterator[None]:
    """reads[k] does not see its sources at positions[k], unless it has no others."""

    def without(dropped: Collection[int]) -> Callable[..., Any]:
        def drop(module: nn.Module, given: tuple[State]) -> tuple[State]:
            seen = given[0]
            return (tuple(source for i, source in enumerate(seen) if i not in dropped) or seen,)

        return drop

    handles = [reads[k].register_forward_pre_hook(without(dropped)) for k, dropped in positions.items()]
    try:
        with ops.backend("reference"):  # the fused path does not call the reads
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def parameters_set(parameters: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Parameters are changed inside the block and restored after it."""
    before = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(change(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)


@contextmanager
def reads_changed(topology: Topology, change: Change) -> Iterator[None]:
    """Every read goes through `change`."""
    plain = topology.step

    def step(k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        with taps.record() as seen:
            h, after = plain(k, y, state)
        return change(k, h, seen), after

    object.__setattr__(topology, "step", step)
    try:
        yield
    finally:
        object.__delattr__(topology, "step")


@contextmanager
def junctions_skipped(topology: Topology, sublayers: Collection[int]) -> Iterator[None]:
    """The junctions after these sublayers do nothing: the state stays, and the next sublayer gets what they read."""
    plain_open, plain_step = topology.open, topology.step
    read: list[Tensor] = []

    def noted(h: Tensor, state: State) -> tuple[Tensor, State]:
        read[:] = [h]
        return h, state

    def open_(x: Tensor) -> tuple[Tensor, State]:
        return noted(*plain_open(x))

    def step(k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        return (read[0], state) if k in sublayers else noted(*plain_step(k, y, state))

    object.__setattr__(topology, "open", open_)
    object.__setattr__(topology, "step", step)
    try:
        yield
    finally:
        object.__delattr__(topology, "open")
        object.__delattr__(topology, "step")
