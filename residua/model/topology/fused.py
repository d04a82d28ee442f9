"""Junctions for decoding that apply the norm of the next sublayer as well: one kernel each.

A fused topology hands each sublayer an input that is already normed. Results are the same but for rounding. It takes
the tensors it needs from the topology it stands in for, and prepares them once: change no weight afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residua.model.topology.base import State, Topology
from residua.ops import decode
from residua.ops.decode import MOST_STREAMS
from residua.ops.decode.launch import MOST_SOURCES
from residua.ops.decode.launch_layers import Junctions

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm


class FusedTopology(Topology):
    """Junctions that norm: norms[k] is applied to the input of sublayer k, the last to the final state."""

    by_junction = True
    """Whether every junction has a kernel of its own. Kernels of whole layers serve those that have none, too."""

    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        self.norms = norms
        self.unread = torch.zeros(1, norms[0].weight.shape[0], device=norms[0].weight.device)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        rows, norm = x.flatten(0, 1).contiguous(), self.norms[0]
        normed, *_ = decode.read_sources([], rows, None, self.unread, norm.weight, eps=norm.eps)
        return normed.view_as(x), (rows,)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        normed, state = self.junction(k, y.flatten(0, 1).contiguous(), state)
        return normed.view_as(y), state

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """`step` on rows [M, C]."""
        raise NotImplementedError

    @property
    def junctions(self) -> Junctions:
        """All junctions, for kernels of whole layers."""
        raise NotImplementedError


class FusedAdditive(FusedTopology):
    """h' = h + y and its norm."""

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        normed, h = decode.add_norm(state[0], y, norm.weight, eps=norm.eps)
        return normed, (h,)

    @property
    def junctions(self) -> Junctions:
        return Junctions("sum")


class FusedBlock(FusedTopology):
    """Block Attention Residuals in two phases (arXiv 2603.15031).

    When a block is finished, its sum and all earlier ones are final: the reads of the whole coming block are evaluated
    against them together. Inside the block each read merges its running sum into what is already there.
    State: o, lse and ‖o‖² of the coming reads, the finished blocks, and the running sum if the block has begun.
    """

    def __init__(self, queries: Tensor, size: int, norms: Sequence[RMSNorm]) -> None:
        """`queries` [reads, C] are u = scale · w ⊙ g; a block has `size` sublayers."""
        super().__init__(norms)
        self.size, self.queries = size, queries
        self.opening = torch.cat([self.unread, self.queries[: size - 1]])
        self.by_junction = len(queries) // size <= MOST_SOURCES

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        norm = self.norms[0]
        normed, v, *reads = decode.read_sources([], x.flatten(0, 1), None, self.opening, norm.weight, eps=norm.eps)
        return normed.view_as(x), (*reads, v)

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        (o, lse, square), sources, place = state[:3], state[3:], k % self.size
        norm = self.norms[k + 1]
        base = sources[-1] if place else None
        finished = sources[:-1] if place else sources
        if place == self.size - 1:
            coming = self.queries[k : k + self.size]
            normed, v, *reads = decode.read_sources(finished, y, base, coming, norm.weight, eps=norm.eps)
            return normed, (*reads, *finished, v)
        read = (o[place], lse[place], square[place])
        normed, p = decode.read_partial(read, y, base, self.queries[k], norm.weight, eps=norm.eps)
        return normed, (o, lse, square, *finished, p)

    @property
    def junctions(self) -> Junctions:
        return Junctions("read", self.queries.unbind(), self.size)


class FusedMultiGate(FusedTopology):
    """Multi-Gate Residuals: while the streams fill, a junction is a read of them; then one gated write and read."""

    def __init__(
        self,
        gates: Sequence[tuple[Tensor, Tensor]],
        pools: Sequence[Tensor],
        norms: Sequence[RMSNorm],
        *,
        competitive: bool,
    ) -> None:
        """`gates` are the query and bias of each gated junction, `pools` the query of each read."""
        super().__init__(norms)
        self.gates, self.pools, self.competitive = gates, pools, competitive
        self.fill = len(pools) - len(gates)
        self.filling = [pool.float()[None] * len(pool) ** -0.5 for pool in self.pools[: self.fill]]

    @staticmethod
    def serves(streams: int) -> bool:
        """Whether the kernels take as many streams."""
        return streams <= MOST_STREAMS

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        if k < self.fill:
            normed, *_ = decode.read_sources(state, y, None, self.filling[k], norm.weight, eps=norm.eps)
            return normed, (*state, y)
        gate, pool = self.gates[k - self.fill], self.pools[k]
        return decode.gate_norm(state, y, *gate, pool, norm.weight, competitive=self.competitive, eps=norm.eps)

    @property
    def junctions(self) -> Junctions:
        return Junctions("gate", self.pools, 1, self.fill + 1, self.gates, self.competitive)
