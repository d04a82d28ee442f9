"""Contexts in which a topology reads otherwise, shared by the families that support them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
def sources_dropped(reads: Sequence[nn.Module], positions: Mapping[int, int]) -> Iterator[None]:
    """reads[k] does not see its source at positions[k], unless that is its only one."""

    def without(position: int) -> Callable[..., Any]:
        def drop(module: nn.Module, given: tuple[State]) -> tuple[State]:
            seen = given[0]
            return (seen[:position] + seen[position + 1 :] if len(seen) > 1 else seen,)

        return drop

    handles = [reads[k].register_forward_pre_hook(without(position)) for k, position in positions.items()]
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
