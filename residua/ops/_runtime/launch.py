"""Helpers for launching kernels: sizes, alignment, tables of addresses, sums of partial results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.triton_support import INTERPRETED


class Kernels:
    """A module of kernels. It is imported, and Triton with it, when the first of them is launched."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(import_module(self._module), name)
        setattr(self, name, kernel)  # the next launch finds it without this method
        return kernel


kernels = Kernels("residua.ops._runtime.kernels")


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, n - 1).bit_length()


def extent(v: Tensor) -> tuple[int, int]:
    """The width and the number of tokens."""
    return v.shape[-1], math.prod(v.shape[:-1])


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and at a 16-byte address, the only case that kernels are compiled for."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def dense_last(x: Tensor) -> Tensor:
    """x with its last axis dense; a row may be part of a wider one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def dense_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty contiguous tensor of x's shape."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def triton_type(dtype: torch.dtype) -> Any:
    """Triton's type of the same name."""
    return getattr(kernels.tl, str(dtype).removeprefix("torch."))


def described(x: Tensor, block: Sequence[int]) -> Any:
    """x as kernels access it by TMA, in blocks of this shape."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x, list(block))


def either(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor or, if None, a stand-in for a pointer that the kernel does not dereference."""
    return other if tensor is None else tensor


def handle(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """A tensor without memory, through whose gradient one backward function sends tensors to a later one.

    It has stride 0, the device of `like` and, unless one is given, its dtype. Only its gradient has a meaning.
    """
    return torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype or like.dtype, device=like.device)


def device_guard(x: Tensor) -> Any:
    """A context that launches kernels on the GPU that holds x."""
    return torch.cuda.device_of(x)


MOST_ADDRESSES = 64
"""Most addresses that one launch writes into a table."""

_TABLES: dict[tuple[Any, ...], Tensor] = {}
_MOST_TABLES = 4096


def addresses(tensors: Sequence[Tensor], others: Sequence[int]) -> Tensor:
    """int64: the addresses of the tensors, then the others. A kernel writes them, so the host does not wait.

    A kernel that takes such a table need not be recompiled for each number of tensors. Training steps reuse the same
    addresses, so tables are cached, except during a CUDA graph capture, which has its own memory.
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
    for start in range(0, len(entries), MOST_ADDRESSES):
        part = tuple(entries[start : start + MOST_ADDRESSES])
        padded = part + part[:1] * (MOST_ADDRESSES - len(part))
        with device_guard(table):
            kernels.address_kernel[(1,)](padded, table, start, len(entries), MOST=MOST_ADDRESSES, num_warps=1)
    return table


def sum_rows(partial: Tensor, total: Tensor) -> None:
    """total, contiguous, = the sum of the rows of partial [parts, LENGTH], in float32 and a fixed order."""
    single = total if total.dtype is torch.float32 else partial.new_empty(total.shape)
    length, block = total.numel(), 4096 if INTERPRETED else 32
    kernels.sum_kernel[(cdiv(length, block),)](partial, single, len(partial), LENGTH=length, PARTS=64, BLOCK=block)
    if single is not total:
        total.copy_(single)
