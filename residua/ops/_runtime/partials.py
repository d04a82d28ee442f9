"""Sums over tokens that persistent programs have taken in parts, one row each: added up in a fixed order."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import divided


def sum_rows(partial: Tensor, total: Tensor) -> None:
    """total [LENGTH] = the sum of the rows of partial [parts, LENGTH], both float32 and contiguous."""
    block = 4096 if fused.INTERPRETED else 32
    _sum_kernel[(divided(len(total), block),)](partial, total, len(partial), LENGTH=len(total), PARTS=64, BLOCK=block)


@triton.jit
def _sum_kernel(partial, total, parts, LENGTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    sum = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        sum += tl.load(partial + part.to(tl.int64) * LENGTH + c, mask=(part < parts) & (c < LENGTH), other=0.0)
    tl.store(total + c, tl.sum(sum, 0)[None, :], mask=c < LENGTH)
