"""Delta Attention Residuals (arXiv 2605.18855): attention over depth that is added to the residual sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from residua.config import choices
from residua.model.topology.attnres import BlockAttnRes, SourcesBoundary, block_names, output_names
from residua.model.topology.base import Boundary, Initialization, Items, State
from residua.model.topology.facts import Costs, Rows, SourceNames, add_rows


class DeltaAttnRes(BlockAttnRes):
    """h_k is the residual sum; sublayer k reads h_k plus a read over the sources of Attention Residuals:

        h_{k+1} = h_k + y_k,   the input of sublayer k+1 is h_{k+1} + Σ a_i v_i,   a = softmax_i( w · (g ⊙ RMS(v_i)) )

    v_0 is the embedding, the others are blocks of `sublayers_per_block` outputs and the running sum of the last block;
    with one sublayer per block every output is a source. The first sublayer reads the embedding, the final norm h.

    Queries start at zero. A read is then the mean of m sources that add up to h, so the input is (1 + 1/m) h.
    """

    def __init__(self, config: choices.DeltaAttnRes, sublayers: int, width: int) -> None:
        super().__init__(config, sublayers - 1, width)

    def open(self, x: Tensor) -> tuple[Tensor, State]:
        _, sources = super().open(x)
        return x, (x, *sources)

    def step(self, k: int, y: Tensor, state: State) -> tuple[Tensor, State]:
        h, sources = state[0] + y, state[1:]
        if k == len(self.reads):
            return h, (h,)
        read, sources = super().step(k, y, sources)
        return h + read, (h, *sources)

    def _block_size(self, config: choices.AttentionResidual) -> int:
        assert isinstance(config, choices.DeltaAttnRes)
        return config.sublayers_per_block

    def initialization(self) -> Initialization:
        factors = [1.0, *(1 + share for share in self._shares()), 1.0]
        return replace(super().initialization(), sum_factors=factors)

    def boundary(self) -> Boundary:
        return DeltaBoundary(self)

    def costs(self, sublayers: int, width: int) -> Costs:
        """Besides the reads: h, y, read → h', input; two gradients → their sum."""
        reads, added = super().costs(sublayers, width), Rows(5, 3)
        floor = add_rows([reads.floor(), *[added] * sublayers])
        junctions = [rows + added.total for rows in (*reads.in_stages(sublayers), 0.0)]
        step = reads.moved() + added.total * sublayers
        return replace(reads, floor=lambda: floor, step=step, junctions=junctions, by_reads=None)

    def source_names(self, sublayers: Sequence[str]) -> SourceNames:
        return (
            output_names(self.plan, sublayers) if self.block_size == 1 else block_names(self._block_size(self.config))
        )


class DeltaBoundary(SourcesBoundary):
    """The sum also crosses; after the last sublayer, only the sum."""

    def begin(self, x: Tensor, *ids: Tensor) -> tuple[Tensor, State]:
        return x, (x, x)

    def after(self, k: int, y: Tensor, state: State, *ids: Tensor) -> State:
        h = state[0] + y
        return (h,) if k == len(self.topology.reads) else (h, *self.topology.sources(k, y, state[1:]))

    def close(self, k: int, y: Tensor, state: State, *ids: Tensor) -> Items:
        h, *sources = self.after(k, y, state)
        named = zip(self._numbers(k), sources, strict=True) if sources else ()
        return {f"sum.{k}": h, **{f"source.{number}": v for number, v in named}}

    def enter(self, k: int, items: Items) -> tuple[Tensor, State]:
        h = items[f"sum.{k}"]
        if k == len(self.topology.reads):
            return h, (h,)
        read, sources = super().enter(k, items)
        return h + read, (h, *sources)
