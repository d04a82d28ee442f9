"""Weights in FP8: launching the kernels, two for all weights of one shape.

Bytes per weight: each of fp32 is read twice, and its code written twice. List operations would read and write 30.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from residua.ops._runtime.launch import addresses, cdiv, device_guard
from residua.ops._runtime.triton_support import INTERPRETED
from residua.ops.fp8_weights import kernels
from residua.ops.low_precision.fp8 import E4M3_MAX, EMPTY_SCALE
from residua.ops.low_precision.product import EncodedWeight

BLOCK = 65536 if INTERPRETED else 8192
TILE = 64
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def encode_weights(weights: Sequence[Tensor], into: Sequence[EncodedWeight]) -> None:
    """The fused twin of the reference."""
    groups: dict[tuple[torch.Size, torch.dtype], list[tuple[Tensor, EncodedWeight]]] = {}
    for weight, encoded in zip(weights, into, strict=True):
        groups.setdefault((weight.shape, weight.dtype), []).append((weight, encoded))
    for ((rows, columns), dtype), group in groups.items():
        count, first = len(group), group[0][0]
        codes, turned, scales = zip(*(encoded for _, encoded in group), strict=True)
        table = addresses([w for w, _ in group], [t.data_ptr() for t in (*codes, *turned, *scales)])
        bits = torch.zeros(count, dtype=torch.int32, device=first.device)
        with device_guard(first):
            kernels.largest_kernel[(cdiv(rows * columns, BLOCK), count)](
                table, bits, rows * columns, W=_TYPES[dtype], BLOCK=BLOCK, num_warps=8
            )
            kernels.encode_kernel[(cdiv(rows, TILE) * cdiv(columns, TILE), count)](
                table, bits, count, rows, columns, LIMIT=E4M3_MAX, EMPTY=EMPTY_SCALE, W=_TYPES[dtype],
                ROWS=TILE, COLUMNS=TILE, num_warps=4,
            )  # fmt: skip
