"""Several reads of one sublayer: a topology may give queries, keys and values inputs of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Reads(NamedTuple):
    """The inputs [B, T, C] of one attention: q's (its gate reads it too), k's and v's. Other sublayers read r."""

    q: Tensor
    k: Tensor
    v: Tensor
    r: Tensor


Input = Tensor | Reads
"""The input of a sublayer."""


def one_read(h: Input) -> Tensor:
    """The input of a sublayer that takes one."""
    return h if isinstance(h, Tensor) else h.r


def map_reads(function: Callable[[Tensor], Tensor], h: Input) -> Input:
    """The function of each read, called once for a tensor that several ways read."""
    if isinstance(h, Tensor):
        return function(h)
    made: list[Tensor] = []
    for i, read in enumerate(h):
        same = [made[j] for j in range(i) if h[j] is read]
        made.append(same[0] if same else function(read))
    return Reads(*made)


def flat_reads(h: Input) -> tuple[Tensor, ...]:
    """The tensors of an input, each once."""
    if isinstance(h, Tensor):
        return (h,)
    return tuple(read for i, read in enumerate(h) if all(h[j] is not read for j in range(i)))
