"""What a topology's junctions move through memory, counted in rows of C elements per token."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from torch import Tensor, nn


class Rows(NamedTuple):
    """Rows of C elements that the forward and the backward pass read or write."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def add_rows(parts: Iterable[Rows]) -> Rows:
    """The rows of several junctions together."""
    found = list(parts)
    return Rows(sum(part.forward for part in found), sum(part.backward for part in found))


ADDITION = Rows(3, 3)
"""h, y → h'; dh and the gradient of h' → the gradient of h, which is also y's."""
ADDED_IN_NORM = 3
"""Rows of an addition that the next norm does: the sum read and written forward, one more gradient read backward."""


def stream_rows(n: int) -> Rows:
    """A junction of n streams: s, f → s', h (2n + 2); s, f, ds', dh → ds, df (3n + 3)."""
    return Rows(2 * n + 2, 3 * n + 3)


def pool_rows(n: int) -> Rows:
    """A read of n streams that stay as they are: s → h; s, ds, dh → ds, with the read's gradient added."""
    return Rows(n + 1, 3 * n + 1)


def read_rows(sources: int) -> Rows:
    """One read of some sources: v → h; v, dh → dv."""
    return Rows(sources + 1, 2 * sources + 1)


def trace_rows(topology: nn.Module, sublayers: int, width: int) -> Rows:
    """The rows of a topology that states none, found by running it on tensors without memory.

    A junction reads the state and y once, and writes once what is new in the next state and input. Backward it reads
    the same tensors and the gradients of what it wrote, and writes the gradients of what it read.
    """
    shapes: Any = deepcopy(topology).to("meta")
    parts = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        traced = shapes.to_empty(device="cpu")
        x = torch.empty(1, 1, width)
        _, state = traced.open(x)
        for k in range(sublayers):
            y = torch.empty_like(x)
            read = _distinct((*state, y))
            h, state = traced.step(k, y, state)
            written = _distinct((h, *state), without=read)
            taken, made = (sum(t.numel() for t in tensors.values()) / width for tensors in (read, written))
            parts.append(Rows(taken + made, 2 * taken + made))
    return add_rows(parts)


def _distinct(tensors: Iterable[Tensor], without: Iterable[int] = ()) -> dict[int, Tensor]:
    known = set(without)
    return {id(tensor): tensor for tensor in tensors if id(tensor) not in known}
