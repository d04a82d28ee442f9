"""Counts the bytes of live CPU tensors, and the peak of a rank while it builds its share of a model."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from residua.config.run import RunConfig
from residua.distributed.mesh import Mesh
from residua.distributed.world import build_ranked_step
from residua.model.decoder import build_parts
from residua.storage.shard_files import local


class LiveBytes(TorchDispatchMode):
    """Follows every CPU tensor that is made inside; `now` and `peak` are bytes."""

    now = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, made)
        return made

    def _see(self, tensor: Tensor) -> None:
        storage = local(tensor).untyped_storage()
        if storage.device.type == "cpu" and storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._add(storage.nbytes())
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._add(-size)

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def size(module: nn.Module) -> int:
    """The bytes of a module's parameters on this rank."""
    return sum(local(p).numel() * p.element_size() for p in module.parameters())


def constructed(config: RunConfig, mesh: Mesh) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model as `residua train` builds it on this rank, with the bytes of its share, and those held at the peak."""
    torch.manual_seed(0)
    with LiveBytes() as live:
        model = build_ranked_step(build_parts(config.model), config, mesh).model
    return model, {"share": torch.tensor(size(model)), "peak": torch.tensor(live.peak)}
