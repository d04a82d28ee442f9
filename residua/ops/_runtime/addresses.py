"""Tables of addresses: how one kernel walks over many tensors without being compiled for their number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import on

MOST = 64
"""Most addresses to one launch of the kernel that writes them down."""

_TABLES: dict[tuple[Any, ...], Tensor] = {}
_MOST_TABLES = 4096


def addresses(tensors: Sequence[Tensor], others: Sequence[int]) -> Tensor:
    """int64: the addresses of the tensors, then the others. A kernel writes it, not the host.

    Steps of training meet the same addresses again and again, so tables are kept; not while a CUDA graph is captured,
    whose memory is its own.
    """
    device = tensors[0].device
    key = (*(t.data_ptr() for t in tensors), *others)
    if not tensors[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return _write(key, device)
    place = (torch.cuda.current_stream(device).cuda_stream, device.index, *key)
    table = _TABLES.get(place)
    if table is None:
        if len(_TABLES) >= _MOST_TABLES:
            _TABLES.clear()
        table = _TABLES[place] = _write(key, device)
    return table


def _write(entries: Sequence[int], device: torch.device) -> Tensor:
    table = torch.empty(len(entries), dtype=torch.int64, device=device)
    for start in range(0, len(entries), MOST):
        part = tuple(entries[start : start + MOST])
        padded = part + part[:1] * (MOST - len(part))
        with on(table):
            _kernel()[(1,)](padded, table, start, len(entries), MOST=MOST, num_warps=1)
    return table


@cache
def _kernel() -> Any:
    from residua.ops._runtime.triton_table import address_kernel

    return address_kernel
