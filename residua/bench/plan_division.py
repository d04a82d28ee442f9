"""A run divided among devices, as a plan sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from residua.config.run import ParallelConfig, RunConfig
from residua.distributed.pipeline.deal import Share
from residua.model.size import Size, Work


@dataclass(frozen=True)
class Division:
    """A run, divided: its `parallel` table, and the axes that only torchtitan has.

    `shares` are those of the stages, `hops` the bytes between them for one micro-batch and direction, in bf16.
    """

    config: RunConfig
    size: Size
    work: Work
    shares: Sequence[Share]
    hops: Sequence[float]
    tensor: int = 1
    context: int = 1

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def ranks(self) -> int:
        return self.parallel.ranks * self.tensor * self.context

    @property
    def micro(self) -> int:
        """Micro-batches of a pipeline in a step."""
        return self.config.train.accumulate // self.parallel.batch_ranks

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank before they are divided by tensor parallelism."""
        return self.config.train.micro_batch * self.config.sequence / self.context

    def of_rank(self, rank: int) -> Sequence[Share]:
        """The stages of a rank of the pipeline."""
        return self.shares[rank :: self.parallel.pipeline]
