"""Bytes between pipeline stages: what is sent, what would be without keeping, and what the formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from residua.config.choices import BlockAttnRes, FullAttnRes
from residua.config.model import ModelConfig
from residua.config.run import ParallelConfig
from residua.distributed.pipeline.transport import Route, cached_blocks, naive_blocks


def hop_bytes(cuts: Sequence[dict[str, Tensor]], routes: Sequence[Route]) -> list[int]:
    """For each hop, the bytes that one micro-batch sends in one direction."""
    return [
        sum(items[name].numel() * items[name].element_size() for name in route.sends)
        for items, route in zip(cuts, routes, strict=False)
    ]


@dataclass(frozen=True)
class Formulas:
    """Bytes of all hops of one micro-batch in one direction, of blocks alone, by the formulas of `transport`."""

    naive: float
    cached: float


def formulas(config: ModelConfig, parallel: ParallelConfig, block: int) -> Formulas | None:
    """For Attention Residuals without a window, with `block` bytes in one block; None for other topologies."""
    topology = config.topology
    if isinstance(topology, BlockAttnRes):
        blocks = config.sublayers / topology.sublayers_per_block
    elif isinstance(topology, FullAttnRes) and topology.window is None:
        blocks = float(config.sublayers)
    else:
        return None
    arguments = parallel.pipeline, parallel.stages_per_rank, blocks / parallel.stages
    return Formulas(naive_blocks(*arguments) * block, cached_blocks(*arguments) * block)


def mib(size: float) -> str:
    return f"{size / 2**20:.3g} MiB"
