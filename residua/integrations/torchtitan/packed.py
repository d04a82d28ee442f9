"""Small JSON in a tensor: torch.distributed.checkpoint pickles whatever is not one."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from residua.reading import parse_json

SIZE = 1024


def pack(value: dict[str, Any]) -> Tensor:
    """JSON as bytes [SIZE], filled up with spaces."""
    text = json.dumps(value).encode()
    assert len(text) <= SIZE, f"{len(text)} bytes do not fit"
    return torch.tensor(list(text.ljust(SIZE)), dtype=torch.uint8)


def unpack(tensor: Tensor, where: str = "the checkpoint's data position") -> Any:
    """What `pack` was given."""
    return parse_json(bytes(tensor.tolist()).decode(), where, "restore the checkpoint from a copy")
