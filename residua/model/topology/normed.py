"""Junctions over whole sequences without gradients that apply the norm of the next sublayer as well.

A normed topology hands each sublayer an input that is already normed: what a junction makes is written once. Results
are the same but for rounding. It takes the tensors it needs from the topology it stands in for, and prepares them once:
change no weight afterwards. (`fused.py` has those for decoding one token per row, where launches count, not bytes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torch import Tensor

from residua import ops
from residua.model.topology.base import State, Topology
from residua.ops import prefill
from residua.ops.depth_attention.launch import parts

if TYPE_CHECKING:
    from residua.model.norm import RMSNorm
    from residua.ops.depth_attention.plan import ReadPlan


class NormedTopology(Topology):
    """norms[k] is applied to the input of sublayer k, the last to the final state."""

    def __init__(self, norms: Sequence[RMSNorm]) -> None:
        super().__init__()
        self.norms = norms

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        rows = x.flatten(0, 1)
        return self.norms[0](x), self.begin(rows)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        normed, state = self.junction(k, y.flatten(0, 1), state)
        return normed.view_as(y), state

    def begin(self, rows: Tensor) -> State:
        """The state of the embedding, rows [M, C]."""
        return (rows,)

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        """`step` on rows [M, C]."""
        raise NotImplementedError


class NormedAdditive(NormedTopology):
    """h' = h + y and its norm."""

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        h, normed = ops.add_norm(state[0], y, norm.weight, eps=norm.eps)
        return normed, (h,)


SIZES = (4, 8)
"""Reads in a group where the plan has more different sizes: each size needs kernels of its own, which a first prompt
waits for. In models of 24 and 72 sublayers these two move as few bytes as the plan does."""


class Source(NamedTuple):
    """A source [M, C] and its scores [readers, ≥ M], from reader `first` on."""

    value: Tensor
    scores: Tensor
    first: int


class Reads(NamedTuple):
    """What later reads need: the sources by number, and of reads that were begun together lse and each one's o."""

    sources: dict[int, Source]
    lse: Tensor | None = None
    begun: tuple[Tensor, ...] = ()


class NormedReads(NormedTopology):
    """Attention Residuals in two phases (arXiv 2603.15031), by the plan that training has for its forward pass.

    The reads of a group are evaluated together over the sources that all of them see; each of them then merges what was
    made since. Queries do not depend on the input, so a source's scores for all its readers are computed at once.
    """

    def __init__(self, plan: ReadPlan, queries: Tensor, norms: Sequence[RMSNorm]) -> None:
        """`queries` [reads, C] are u = scale · w ⊙ g."""
        super().__init__(norms)
        self.plan, self.queries = plan, prefill.Queries(queries.contiguous(), parts(queries))
        several = {size for _, size in plan.group} - {1}
        self.group = plan.group if len(several) <= len(SIZES) else plan.groups((1, *SIZES))

    def begin(self, rows: Tensor) -> State:
        scores, rows = prefill.source_scores(rows.contiguous(), None, self.queries, 0, len(self.plan.readers[0]))
        return _state(Reads({0: Source(rows, scores, 0)}))

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        reads, plan, norm = cast(Reads, state[0]), self.plan, self.norms[k + 1]
        start, size = self.group[k]
        new = [s for s in plan.sees[k] if s <= k and (k == start or s not in plan.sees[start])]
        seen = [reads.sources[s] for s in new]
        others, scores, rows = [s.value for s in seen], [s.scores for s in seen], [k - s.first for s in seen]
        base = reads.sources[k].value if plan.grows[k + 1] else None
        if k == start and size > 1:
            z, v = prefill.source_scores(y, base, self.queries, k, len(plan.readers[k + 1]))
            lse, (first, *begun) = prefill.read_group([*others, v], [*scores, z], [*rows, 0], size)
            after = Reads(self._kept(k, reads, Source(v, z, k)), lse, tuple(begun))
            return norm(first), _state(after)
        begun = list(reads.begun)
        if k > start:
            assert reads.lse is not None
            others, scores, rows = [begun.pop(0), *others], [reads.lse, *scores], [k - start, *rows]
        normed, v = prefill.read_norm(
            others, scores, rows, y, base, self.queries.u[k], norm.weight, eps=norm.eps
        )  # fmt: skip
        later = len(plan.readers[k + 1]) - 1
        z = prefill.source_scores(v, None, self.queries, k + 1, later)[0] if later else v
        return normed, _state(Reads(self._kept(k, reads, Source(v, z, k + 1)), reads.lse, tuple(begun)))

    def _kept(self, k: int, reads: Reads, made: Source) -> dict[int, Source]:
        """The sources that something after read k needs."""
        plan = self.plan
        every = {**reads.sources, k + 1: made}
        return {s: v for s, v in every.items() if plan.readers[s][-1] > k or (s == k + 1 and plan.grows[s + 1])}


def _state(reads: Reads) -> State:
    """As one object: nothing but `junction` looks into it."""
    return cast(State, (reads,))


SEGMENT = 2
"""Gated junctions of which one stores the streams."""


class NormedMultiGate(NormedTopology):
    """Multi-Gate Residuals: while the streams fill, a junction is a read of them; then one gated write and read.

    Streams are linear in what is written to them: a junction that does not store them notes its update and β, and the
    next one reads n + 1 rows more instead of n written and n read. State: the streams [M, C], then `Streams`.
    """

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

    def junction(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        norm = self.norms[k + 1]
        if k < self.fill:
            h, streams = ops.pool_streams((*state, y), self.pools[k])
            return norm(h), streams
        held = cast(prefill.Streams, state[0]) if k > self.fill else prefill.Streams(state)
        gate, ends = self.gates[k - self.fill], (k - self.fill) % SEGMENT == SEGMENT - 1
        normed, after = prefill.gate_norm(
            held, y, *gate, self.pools[k], norm.weight, store=ends, competitive=self.competitive, eps=norm.eps
        )
        return normed, cast(State, (after,))
