"""torchtitan's device mesh under the names that `residua.distributed` uses: pipeline, data, shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from residua.config.run import ParallelConfig
from residua.distributed.mesh import Mesh


class Grid(Mesh):
    """The place of this rank in a mesh that torchtitan made, with its groups."""

    def __init__(self, dims: Any, parallel: ParallelConfig, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        axes = {"pipeline": "pp", "data": "dp_replicate", "shard": "fsdp"}
        meshes = {name: dims.get_optional_mesh(axis, include_singleton_axes=True) for name, axis in axes.items()}
        self.pipeline, self.data, self.shard = (meshes[name].get_group() for name in axes)
        self.pipeline_rank, self.data_rank, self.shard_rank = (meshes[name].get_local_rank() for name in axes)
        sizes = {name: mesh.size() for name, mesh in meshes.items()} | {"experts": dims.ep}
        self.config = parallel.model_copy(update=sizes)
        grid: dict[Any, Any] = {"shard": meshes["shard"]}
        if self.config.data > 1:
            grid["data", "shard"] = dims.get_mesh(["dp_replicate", "fsdp"])
        self.grid = grid  # type: ignore[assignment]
        if self.config.experts > 1:
            self._divide_experts()

    @property
    def ranks(self) -> int:
        """Ranks that hold different tokens of a step."""
        return self.config.data * self.config.shard
