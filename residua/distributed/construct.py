"""Each rank builds its share of a model: no process ever holds the whole of it.

The model is built without memory (on the meta device) and divided: into stages, experts and shards. What is left gets
memory on the rank's device. Then the weights are drawn part by part, a sublayer at a time, exactly as one process draws
them; each rank copies the rows it has and drops the part. So every rank starts from the weights of one process, bit for
bit, and at its peak holds its share and one layer (or the embedding). Every rank draws all the numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from residua.distributed.mesh import Mesh
from residua.storage.sharded import local

Parts = Iterable[tuple[str, nn.Module]]
"""Pieces of a model with weights, by name; the name of a whole model is empty."""


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give memory on the device to every tensor that has none; its values are undefined until `fill`."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                owner._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def fill(model: nn.Module, parts: Parts, mesh: Mesh) -> None:
    """Copy into a divided model what this rank has of each part. Each part is dropped before the next is asked for."""
    places = dict(chain(model.named_parameters(), model.named_buffers()))
    for prefix, part in parts:
        for name, value in chain(part.named_parameters(prefix), part.named_buffers(prefix)):
            if (place := places.pop(name, None)) is not None:
                _copy(place, value, mesh)
            del value
        del part
    assert not places, f"no part has {sorted(places)[:3]}"


def construct(model: nn.Module, parts: Parts, mesh: Mesh) -> None:
    """Give a divided model on the meta device its memory and its weights."""
    materialise(model, mesh.device)
    fill(model, parts, mesh)


def rows_of(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """The rows [start, end) of a shard. FSDP2 divides rows as `torch.chunk` does."""
    size = -(-rows // shards)
    return min(rows, shard * size), min(rows, (shard + 1) * size)


def _copy(place: Tensor, value: Tensor, mesh: Mesh) -> None:
    if isinstance(place, DTensor):
        start, end = rows_of(len(value), mesh.config.shard, mesh.shard_rank)
        value = value[start:end]
    local(place).copy_(value)
