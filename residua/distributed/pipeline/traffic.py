"""Bytes between pipeline stages: measured, without caching, and by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from residua.config.run import ParallelConfig
from residua.distributed.pipeline.transport import Route, cached_blocks, naive_blocks


def hop_bytes(boundaries: Sequence[dict[str, Tensor]], routes: Sequence[Route]) -> list[int]:
    """For each hop, the bytes that one micro-batch sends in one direction."""
    return [
        sum(items[name].numel() * items[name].element_size() for name in route.sends)
        for items, route in zip(boundaries, routes, strict=False)
    ]


@dataclass(frozen=True)
class Formulas:
    """Bytes that one micro-batch sends over all hops in one direction, blocks only, by the formulas of `transport`."""

    naive: float
    cached: float


def formulas(blocks: float | None, parallel: ParallelConfig, block: int) -> Formulas | None:
    """For Attention Residuals with so many blocks of `block` bytes (`Topology.blocks`); None for other topologies."""
    if blocks is None:
        return None
    arguments = parallel.pipeline, parallel.stages_per_rank, blocks / parallel.stages
    return Formulas(naive_blocks(*arguments) * block, cached_blocks(*arguments) * block)


def mib(size: float) -> str:
    """Bytes as people read them."""
    return f"{size / 2**20:.3g} MiB"
