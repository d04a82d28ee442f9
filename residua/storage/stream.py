"""Writing a safetensors file tensor by tensor: only one of them is in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from residua.storage.finite import require_finite
from residua.storage.tensors import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8
FINITE = "use weights that are finite, and if they are, a wider type"


class Entry(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], source: str | Path = "the model"
) -> None:
    """Write the tensors, in the order of `entries`; each is converted to its dtype, and released before the next.

    A tensor that is not finite in its dtype is refused; `source` says where it came from.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert tuple(tensor.shape) == tuple(entry.shape), f"{entry.name} has shape {tuple(tensor.shape)}"
            flat = tensor.detach().cpu().to(entry.dtype).contiguous().view(-1)
            require_finite({entry.name: flat}, source, f"it was not written as {NAMES[entry.dtype]}; {FINITE}")
            if len(flat):
                file.write(flat.view(torch.uint8).numpy().data)
