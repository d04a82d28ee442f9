"""torchtitan's device mesh under the names that `residua.distributed` uses: pipeline, data, shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from residua.config.run import ParallelConfig
from residua.distributed.mesh import Mesh


class Grid(Mesh):
    """The place of this rank in a mesh that torchtitan made, with its groups."""

    def __init__(self, dims: Any, parallel: ParallelConfig, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        axes = {"pipeline": "pp", "data": "dp_replicate", "shard": "fsdp", "tensor": "tp", "context": "cp"}
        meshes = {name: dims.get_optional_mesh(axis, include_singleton_axes=True) for name, axis in axes.items()}
        self.pipeline, self.data, self.shard, self.tensor, self.context = (meshes[n].get_group() for n in axes)
        places = (meshes[name].get_local_rank() for name in axes)
        self.pipeline_rank, self.data_rank, self.shard_rank, self.tensor_rank, self.context_rank = places
        self.tensor_ranks: int = meshes["tensor"].size()
        self.context_ranks: int = meshes["context"].size()
        sizes = {name: meshes[name].size() for name in ("pipeline", "data", "shard")} | {"experts": dims.ep}
        self.config = parallel.model_copy(update=sizes)
        grid: dict[Any, Any] = {"shard": meshes["shard"]}
        if self.config.data > 1:
            grid["data", "shard"] = dims.get_mesh(["dp_replicate", "fsdp"])
        self.grid = grid  # type: ignore[assignment]
        if self.config.experts > 1:
            self._divide_experts()
        if self.tensor_ranks > 1:
            self._join_tokens()

    def _join_tokens(self) -> None:
        """The ranks that have different tokens of a copy of the model, along one axis: shard × tensor."""
        sizes = (self.config.pipeline, self.config.data, self.config.shard * self.tensor_ranks)
        joined = init_device_mesh(self.device.type, sizes, mesh_dim_names=("stage", "copy", "token"))
        self.tokens, self.tokens_rank = joined.get_group("token"), joined.get_local_rank("token")
        self.joined = joined["token"] if self.config.data == 1 else joined["copy", "token"]

    @property
    def ranks(self) -> int:
        """Ranks that hold different tokens of a step."""
        return self.config.data * self.config.shard * self.tensor_ranks

    def over_batch(self, tensor: Tensor) -> Tensor:
        super().over_batch(tensor)
        if self.tensor_ranks > 1:
            dist.all_reduce(tensor, group=self.tensor)
        return tensor

    def over_copies(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that have the same heads and other sequences, in place."""
        return super().over_batch(tensor)
