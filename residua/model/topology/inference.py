"""Junctions without gradients that also apply the next sublayer's norm, so that their output is written once, normed.

They serve prompts, limited by bytes moved, and decoding of one token per row, limited by launches. Results equal those
of the topology up to rounding. Tensors are prepared once: change no weight afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from residua import ops
from residua.model.topology.base import State, Topology
from residua.ops import inference
from residua.ops.whole_layers.launch import Junctions

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.ops.depth_attention.plan import ReadPlan


class InferenceTopology(Topology):
    """A topology that passes normed inputs to sublayers: norms[k] belongs to sublayer k, the last is the final norm."""

    whole_layers: Junctions | None = None
    """All junctions, for the kernel that decodes whole layers; None if it does not support them."""

    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        self.norms = norms

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        return self.norms[0](x), (x.flatten(0, 1).contiguous(),)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        normed, state = self.junction(k, y.flatten(0, 1).contiguous(), state, decoding=y.shape[1] == 1)
        return normed.view_as(y), state

    def junction(self, k: int, y: Tensor, state: State, *, decoding: bool) -> tuple[Tensor, State]:
        """`step` on rows [M, C]; with `decoding`, one token of each sequence."""
        raise NotImplementedError


class AdditiveInference(InferenceTopology):
    """h' = h + y and its norm."""

    whole_layers = Junctions("sum")

    def junction(self, k: int, y: Tensor, state: State, *, decoding: bool) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        normed, h = inference.add_norm(state[0], y, norm.weight, eps=norm.eps)
        return normed, (h,)


GROUP_SIZES = (4, 8)
"""Group sizes used if the plan has more distinct ones: each size needs its own kernels, and a first prompt waits for
their compilation. In models of 24 and 72 sublayers these two move as few bytes as the plan."""


class Source(NamedTuple):
    """A source [M, C] and its scores [readers, ≥ M], starting with reader `first`."""

    value: Tensor
    scores: Tensor
    first: int


class Reads(NamedTuple):
    """The state for later reads: sources by number, and for reads evaluated together their lse and each one's o."""

    sources: dict[int, Source]
    lse: Tensor | None = None
    begun: tuple[Tensor, ...] = ()


class ReadInference(InferenceTopology):
    """Attention Residuals in two phases (arXiv 2603.15031).

    Prompts follow the plan of training's forward pass. The reads of a group are evaluated together over the sources
    that all of them see; each read then merges newer sources. Queries do not depend on the input, so a source's scores
    for all its readers are computed at once.

    In decoding, blocks need one launch each. When a block is finished, its sum and all earlier ones are final, so all
    reads of the next block are evaluated against them together. Inside the block each read merges the running sum into
    that result. State: o, lse and ‖o‖² of the coming reads, the finished blocks, and the running sum if the block has
    begun.
    """

    def __init__(self, plan: ReadPlan, queries: Tensor, size: int | None, norms: Sequence[RMSNorm]) -> None:
        """`queries` [reads, C] are u = scale · w ⊙ g; a block has `size` sublayers, or None without blocks."""
        super().__init__(norms)
        self.plan, self.size = plan, size
        self.queries = inference.Queries.of(queries)
        sizes = {count for _, count in plan.group} - {1}
        self.group = plan.group if len(sizes) <= len(GROUP_SIZES) else plan.groups((1, *GROUP_SIZES))
        if size is not None:
            self.opening = torch.cat([torch.zeros_like(queries[:1]), queries[: size - 1]])
            self.whole_layers = Junctions("read", queries.unbind(), size)

    def _in_blocks(self, decoding: bool) -> bool:
        return decoding and self.size is not None and len(self.queries.u) // self.size <= inference.MOST_SOURCES

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        rows, norm = x.flatten(0, 1).contiguous(), self.norms[0]
        if self._in_blocks(x.shape[1] == 1):
            normed, v, *reads = inference.read_sources([], rows, None, self.opening, norm.weight, eps=norm.eps)
            return normed.view_as(x), (*reads, v)
        scores, rows = inference.source_scores(rows, None, self.queries, 0, len(self.plan.readers[0]))
        return norm(x), _state(Reads({0: Source(rows, scores, 0)}))

    def junction(self, k: int, y: Tensor, state: State, *, decoding: bool) -> tuple[Tensor, State]:
        if self._in_blocks(decoding):
            return self._read_block(k, y, state)
        reads, plan, norm = cast(Reads, state[0]), self.plan, self.norms[k + 1]
        start, size = self.group[k]
        new = [s for s in plan.sees[k] if s <= k and (k == start or s not in plan.sees[start])]
        sources = [reads.sources[s] for s in new]
        others, scores, rows = [s.value for s in sources], [s.scores for s in sources], [k - s.first for s in sources]
        base = reads.sources[k].value if plan.grows[k + 1] else None
        if k == start and size > 1:
            z, v = inference.source_scores(y, base, self.queries, k, len(plan.readers[k + 1]))
            lse, (first, *begun) = inference.read_group([*others, v], [*scores, z], [*rows, 0], size)
            after = Reads(self._needed(k, reads, Source(v, z, k)), lse, tuple(begun))
            return norm(first), _state(after)
        begun = list(reads.begun)
        if k > start:
            assert reads.lse is not None
            others, scores, rows = [begun.pop(0), *others], [reads.lse, *scores], [k - start, *rows]
        normed, v = inference.read_norm(
            others, scores, rows, y, base, self.queries.u[k], norm.weight, eps=norm.eps
        )  # fmt: skip
        later = len(plan.readers[k + 1]) - 1
        z = inference.source_scores(v, None, self.queries, k + 1, later)[0] if later else v
        return normed, _state(Reads(self._needed(k, reads, Source(v, z, k + 1)), reads.lse, tuple(begun)))

    def _needed(self, k: int, reads: Reads, newest: Source) -> dict[int, Source]:
        """The sources that reads after k still need."""
        plan = self.plan
        every = {**reads.sources, k + 1: newest}
        return {s: v for s, v in every.items() if plan.readers[s][-1] > k or (s == k + 1 and plan.grows[s + 1])}

    def _read_block(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        assert self.size is not None
        (o, lse, square), sources, place = state[:3], state[3:], k % self.size
        norm, u = self.norms[k + 1], self.queries.u
        base = sources[-1] if place else None
        finished = sources[:-1] if place else sources
        if place == self.size - 1:
            coming = u[k : k + self.size]
            normed, v, *reads = inference.read_sources(finished, y, base, coming, norm.weight, eps=norm.eps)
            return normed, (*reads, *finished, v)
        read = (o[place], lse[place], square[place])
        normed, p = inference.read_partial(read, y, base, u[k], norm.weight, eps=norm.eps)
        return normed, (o, lse, square, *finished, p)


def _state(state: Reads | inference.Streams) -> State:
    """Cast to `State`: only `junction` looks inside."""
    return cast(State, (state,))


SEGMENT = 2
"""In prompts, one of this many gated junctions stores the streams."""


class StreamInference(InferenceTopology):
    """Multi-Gate Residuals: while the streams fill, a junction reads them; later, it is one gated write and read.

    Streams are linear in the updates written to them, so a junction need not store them. It then records its update and
    β, and the next one reads n + 1 more rows, which saves n written and n read. State: the streams [M, C], then
    `Streams`.
    """

    def __init__(
        self,
        gates: Sequence[tuple[Tensor, Tensor]],
        pools: Sequence[Tensor],
        norms: Sequence[RMSNorm],
        *,
        competitive: bool,
    ) -> None:
        """`gates`: the query and bias of each gated junction. `pools`: the query of each read."""
        super().__init__(norms)
        self.gates, self.pools, self.competitive = gates, pools, competitive
        self.fill = len(pools) - len(gates)
        self.filling = [pool.float()[None] * len(pool) ** -0.5 for pool in pools[: self.fill]]
        self.whole_layers = Junctions("gate", pools, 1, self.fill + 1, gates, competitive)

    def junction(self, k: int, y: Tensor, state: State, *, decoding: bool) -> tuple[Tensor, State]:
        norm, gated = self.norms[k + 1], k - self.fill
        if gated < 0 and decoding:
            normed, *_ = inference.read_sources(state, y, None, self.filling[k], norm.weight, eps=norm.eps)
            return normed, (*state, y)
        if gated < 0:
            h, streams = ops.pool_streams((*state, y), self.pools[k])
            return norm(h), streams
        gated_state = cast(inference.Streams, state[0]) if gated else inference.Streams(state)
        normed, after = inference.gate_norm(
            gated_state, y, *self.gates[gated], self.pools[k], norm.weight,
            store=decoding or gated % SEGMENT == SEGMENT - 1, competitive=self.competitive, eps=norm.eps,
        )  # fmt: skip
        return normed, _state(after)
