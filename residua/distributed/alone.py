"""A world of one rank: the code of a parallel run on one device, to measure what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from residua.config.run import ParallelConfig
from residua.distributed.mesh import Mesh


@contextmanager
def one_rank(device: torch.device, config: ParallelConfig) -> Iterator[Mesh]:
    """A mesh of this process alone, with NCCL on a GPU and gloo on a CPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Mesh(config, device)
    finally:
        dist.destroy_process_group()
