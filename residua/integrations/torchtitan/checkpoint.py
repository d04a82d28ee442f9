"""Saves the part of a parameter on a tensor-parallel rank by its place in the whole, so that any mesh can read it.

torch.distributed.checkpoint pickles everything that is not a tensor, so small JSON is packed into a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from residua.reading import parse_json

Placed = tuple[tuple[int, ...], Tensor]
"""The offset of a piece in the whole parameter, and the piece."""


class Pieces(Tensor):
    """A parameter of which this rank has some pieces; torch.distributed.checkpoint reads and writes these."""

    placed: list[Placed]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: Tensor, placed: Iterable[Placed]) -> Pieces:
        pieces: Pieces = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        pieces.placed = list(placed)
        return pieces

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a parameter that is divided among ranks")

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the first piece, which torchtitan compares to see whether a tensor is still the same."""
        return self.placed[0][1].untyped_storage() if self.placed else torch.UntypedStorage(0)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(place), piece.size()) for place, piece in self.placed]

    def __create_write_items__(self, name: str, whole: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), whole.size()),
            )
            for chunk, (_, piece) in zip(self.__create_chunk_list__(), self.placed, strict=True)
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(piece for place, piece in self.placed if torch.Size(place) == index.offset)


@torch.no_grad()
def copy_share(into: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor."""
    if isinstance(into, Pieces):
        for place, piece in into.placed:
            piece.copy_(value[tuple(slice(o, o + n) for o, n in zip(place, piece.shape, strict=True))])
    elif isinstance(into, DTensor):
        for chunk in into.__create_chunk_list__():
            rows = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            into.to_local().copy_(value[rows])
    else:
        into.copy_(value)


SIZE = 1024


def pack(value: dict[str, Any]) -> Tensor:
    """JSON as bytes [SIZE], padded with spaces."""
    text = json.dumps(value).encode()
    assert len(text) <= SIZE, f"{len(text)} bytes do not fit"
    return torch.tensor(list(text.ljust(SIZE)), dtype=torch.uint8)


def unpack(tensor: Tensor, where: str = "the checkpoint's data position") -> Any:
    """The inverse of `pack`."""
    return parse_json(bytes(tensor.tolist()).decode(), where, "restore the checkpoint from a copy")
