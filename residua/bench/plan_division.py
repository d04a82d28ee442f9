"""A run divided among devices, as a plan sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from residua.config.run import ParallelConfig, RunConfig
from residua.distributed.pipeline.shares import Share
from residua.model.size import Size, Work
from residua.model.topology.base import Items


@dataclass(frozen=True)
class Facts:
    """What all divisions of a run have in common.

    depth: bytes that junctions move per token when the model is not cut. per_layer, once: elements kept per token for
    the backward pass (`plan_memory.activation_widths`). crossing: what would cross after each sublayer.
    """

    size: Size
    work: Work
    depth: float
    per_layer: float
    once: float
    crossing: Mapping[int, Items]


@dataclass(frozen=True)
class Division:
    """A run, divided: its `parallel` table, and the axes that only torchtitan has.

    `shares` are those of the stages, `hops` the bytes between them for one micro-batch and direction, in bf16.
    """

    config: RunConfig
    facts: Facts
    shares: Sequence[Share]
    hops: Sequence[float]
    tensor: int = 1
    context: int = 1

    @property
    def size(self) -> Size:
        return self.facts.size

    @property
    def work(self) -> Work:
        return self.facts.work

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
