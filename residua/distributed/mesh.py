"""The processes of a run, and their grid: pipeline × data × shard.

`Processes` starts the process group, `Mesh` arranges its ranks, `job_store` connects to the key-value store of the job,
and `one_rank` is a mesh of this process alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from residua.config.run import ParallelConfig
from residua.config.settings import ConfigError
from residua.distributed.nodes import Start, meet

# Ranks with neighbouring numbers usually have the fastest links, so the axis that communicates most comes last.
AXES = ("pipeline", "data", "shard")


class Mesh:
    """The place of this rank in the grid, and its process group along each axis.

    With `parallel.experts` > 1 the shard axis is split in two: `experts`, ranks with different experts, which exchange
    tokens, and `slices`, ranks with the same experts, which shard them further.
    """

    experts: dist.ProcessGroup
    slices: dist.ProcessGroup

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = (config.pipeline, config.data, config.shard)
        self.grid: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self.pipeline_rank, self.data_rank, self.shard_rank = (self.grid.get_local_rank(axis) for axis in AXES)
        self.pipeline, self.data, self.shard = (self.grid.get_group(axis) for axis in AXES)
        if config.experts > 1:
            self._divide_experts()

    def _divide_experts(self) -> None:
        """Ranks with the same experts are neighbours, so the experts are divided by rows, like any matrix."""
        config = self.config
        sizes = (config.pipeline * config.data, config.experts, config.slices)
        within = init_device_mesh(self.device.type, sizes, mesh_dim_names=("others", "experts", "slices"))
        self.experts, self.slices = within.get_group("experts"), within.get_group("slices")

    @property
    def shards(self) -> DeviceMesh:
        """The mesh axes for FSDP2: one for shards, two for replicated shards."""
        return self.grid["shard"] if self.config.data == 1 else self.grid["data", "shard"]

    @property
    def expert_rank(self) -> int:
        """Which of the `parallel.experts` parts of the experts this rank has; shard / experts ranks share each part."""
        return self.shard_rank // self.config.slices

    @property
    def batch_rank(self) -> int:
        """Which share of a step's micro-batches this rank computes; the same on all ranks of a pipeline."""
        return self.data_rank * self.config.shard + self.shard_rank

    def over_batch(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """The sum, or the result of another operation, over the ranks that have different micro-batches, in place."""
        for group in (self.data, self.shard):
            if group.size() > 1:
                dist.all_reduce(tensor, operation, group=group)
        return tensor

    def over_all(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor


class Processes:
    """The process group of a run, from `start` to `stop`."""

    def __init__(self, device: torch.device, start: Start, timeout: timedelta) -> None:
        self.device, self.started, self.timeout = device, start, timeout

    @classmethod
    def start(cls, device: torch.device, patience: int) -> Self:
        """Join the processes that torchrun started: gloo for CPU tensors, NCCL for GPU tensors."""
        if device.type == "cuda":
            local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
            if local >= gpus:
                raise ConfigError(
                    f"process {local} of this machine has no GPU for itself, since PyTorch sees {gpus}: "
                    f"start torchrun with --nproc-per-node {gpus} or fewer."
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=max(600, 2 * patience))
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        start = meet(job_store("meeting", timeout), rank, size, restarts)
        store = job_store(f"group/{start.name}", timeout)
        dist.init_process_group(_backend(device), store=store, rank=rank, world_size=size, timeout=timeout)
        return cls(device, start, timeout)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def one_rank(device: torch.device, config: ParallelConfig) -> Iterator[Mesh]:
    """A mesh of this process alone, to measure and test the distributed code on one device."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Mesh(config, device)
    finally:
        dist.destroy_process_group()


_served: list[dist.Store] = []
"""The store that this process serves, if any; it lives as long as the process."""


def job_store(name: str, timeout: timedelta) -> dist.Store:
    """A new connection to the key-value store of the job.

    torchrun keeps one store through all restarts of a job. Keys begin with `name`, which contains the name of the start
    (`nodes.meet`), so a process never reads entries of dead ones. Without torchrun, rank 0 serves the store at
    MASTER_PORT.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0" and not _served
    store = dist.TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    if serves:
        _served.append(store)
    return dist.PrefixStore(f"residua/{name}", store)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
