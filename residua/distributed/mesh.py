"""The ranks of a run as a grid: pipeline × data × shard, the shards of one copy being neighbours."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from residua.config.run import ParallelConfig
from residua.config.settings import ConfigError

AXES = ("pipeline", "data", "shard")
# Neighbours with the fastest links are ranks with neighbouring numbers: what talks most comes last.


class Mesh:
    """Where this process stands in the grid, and whom it talks to along each axis."""

    def __init__(self, config: ParallelConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        sizes = (config.pipeline, config.data, config.shard)
        self.grid: DeviceMesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self.pipeline_rank, self.data_rank, self.shard_rank = (self.grid.get_local_rank(axis) for axis in AXES)
        self.pipeline, self.data, self.shard = (self.grid.get_group(axis) for axis in AXES)

    @property
    def batch_rank(self) -> int:
        """Which share of a step's micro-batches this rank has; the ranks of one pipeline have the same."""
        return self.data_rank * self.config.shard + self.shard_rank

    def over_batch(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks that have different micro-batches, in place."""
        for group in (self.data, self.shard):
            if group.size() > 1:
                dist.all_reduce(tensor, group=group)
        return tensor

    def over_all(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor


class Processes:
    """The process group of this run, from `start` to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def start(cls, device: torch.device, patience: int) -> Self:
        """Meet the other processes that torchrun has started; gloo for CPU tensors, NCCL for those on GPUs."""
        if device.type == "cuda":
            device = _own_gpu()
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=max(600, 2 * patience))
        dist.init_process_group(backend, store=job_store("group", timeout), rank=rank, world_size=size, timeout=timeout)
        return cls(device)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


_served: list[dist.Store] = []


def job_store(name: str, timeout: timedelta) -> dist.Store:
    """A connection to the job's key-value store, its keys apart from other names' and from earlier starts of the job.

    torchrun keeps one store through all restarts, where a new process would find the addresses of dead ones.
    Where there is no torchrun, rank 0 serves it.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and os.environ["RANK"] == "0" and not _served
    store = dist.TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    if serves:
        _served.append(store)
    return dist.PrefixStore(f"residua/{name}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _own_gpu() -> torch.device:
    local, seen = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= seen:
        raise ConfigError(
            f"process {local} of this machine has no GPU of its own, PyTorch sees {seen}: start torchrun with "
            f"--nproc-per-node {seen} or fewer."
        )
    return torch.device("cuda", local)
