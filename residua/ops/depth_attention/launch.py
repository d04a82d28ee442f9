"""How the kernels of attention over depth are launched: tile sizes, and how work is shared among programs.

A source is [..., C] and its tokens are all the leading axes; per-token scalars are fp32 rows of `pitch(tokens)`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops import fused as shared
from residua.ops.launch import divided, power

CHUNK = 32
"""Most readers to one matrix product; see `product_tile`."""


class _Kernels(NamedTuple):
    forward: Any
    backward: Any


@cache
def kernels() -> _Kernels:
    """The modules of kernels; Triton is imported when the first of them runs."""
    from residua.ops.depth_attention import triton, triton_backward

    return _Kernels(triton, triton_backward)


def pitch(tokens: int) -> int:
    """Length of a row of per-token scalars: every row starts 16-byte aligned."""
    return (tokens + 15) // 16 * 16


def row(scores: Tensor, index: int) -> int:
    """The address of a row of scalars."""
    return scores.data_ptr() + index * scores.stride(0) * scores.element_size()


UNROLL = 2
"""Rows in flight at once; more were slower at every number of sources, registers being what bounds these kernels."""


NUMBERS = {"TOKENS": 64, "LANES": 8}
"""The tile of kernels that work on per-token scalars alone: tokens, and sources or readers."""


def row_tile(width: int) -> dict[str, Any]:
    """For kernels that reduce over whole rows: a row in two pieces, one warp to a token, so no barriers."""
    low = 1 << max(0, (width - 1).bit_length() - 1)
    high = max(power(width - low), min(256, low))
    tile = {"C": width, "LOW": low, "HIGH": high}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16}
    return {**tile, "TOKENS": 1, "num_warps": 1 if width <= 1536 else 4}


def piece_tile(width: int, rows: int) -> dict[str, Any]:
    """For kernels that hold several rows of a token: the row in pieces of equal length, and as few warps as can be.

    A thread has room for about 220 fp32 numbers, and where warps share a row they must wait for each other.
    """
    if shared.INTERPRETED:
        piece = min(64, max(16, power(width)))
        return {"C": width, "PIECE": piece, "PIECES": divided(width, piece), "TOKENS": 16, "TOGETHER": False}
    warps = next(n for n in (1, 2, 4, 8, 16) if rows * width <= n * 32 * 220 or n == 16)
    piece = min(power(width), 256 if width % 512 else 256 * max(1, warps // 2))
    tile = {"C": width, "PIECE": piece, "PIECES": divided(width, piece), "TOKENS": 1}
    return {**tile, "TOGETHER": warps > 1, "num_warps": warps}


def mix_tile(width: int) -> dict[str, Any]:
    """For kernels that do not reduce over a row."""
    columns = min(256, max(16, power(width)))
    return {"C": width, "TOKENS": 2048 // columns, "COLUMNS": columns}


def stack_tile(v: Tensor, results: int, columns: int, stages: int) -> dict[str, Any]:
    """For kernels that are matrix products over a stack of rows, one for each token and each with a warp of its own.

    `columns` and `stages` were the fastest on an H200 from 768 to 2,048 channels; float32 has room for fewer columns.
    """
    width, narrow = v.shape[-1], v.dtype == torch.bfloat16 and not shared.INTERPRETED
    tile = {"C": width, "NARROW": narrow, "ROWS": 16, "PADDED": max(8, power(results))}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, power(width)))}
    columns = min(columns if narrow else 64, max(16, power(width)))
    return {**tile, "TOKENS": 1, "COLUMNS": columns, "num_warps": 1, "num_stages": stages}


def scores_tile(width: int, readers: int, v: Tensor) -> dict[str, Any]:
    tokens, stages = (128, 4) if readers <= CHUNK else (64, 3)
    return product_tile(width, readers, v, tokens, 64, stages)


def scores_gradient_tile(width: int, readers: int, v: Tensor) -> dict[str, Any]:
    return product_tile(width, readers, v, 16 if readers <= CHUNK else 32, 128, 3)


def product_tile(width: int, readers: int, v: Tensor, tokens: int, columns: int, stages: int) -> dict[str, Any]:
    """For kernels that are matrix products between tokens and readers, CHUNKS of them.

    With 64 readers to a product Triton makes asynchronous products that still read a buffer while its pipeline loads
    the next tile into it (a source that is used both in a product and otherwise gets one buffer too few). With 32 it
    makes none. The sums of all chunks stay in registers, so from four chunks on tiles are smaller.
    """
    chunks = divided(readers, CHUNK)
    tile = {"C": width, "READERS": min(CHUNK, max(16, power(readers))), "CHUNKS": chunks}
    tile["NARROW"] = v.dtype == torch.bfloat16 and not shared.INTERPRETED
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, power(width)))}
    if not tile["NARROW"]:
        tokens, columns, stages = 64 if chunks == 1 else 32, 64, 3
    smaller, warps = power(divided(chunks, 3)), 4 if tile["NARROW"] or chunks == 1 else 8
    tokens, columns = max(16, tokens // smaller), max(16, min(columns // smaller, power(width)))
    return {**tile, "TOKENS": tokens, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def shares(x: Tensor, blocks: int, per_core: float) -> tuple[int, int]:
    """Split `blocks` among programs that loop: how many programs, and how many blocks each."""
    tiles = divided(blocks, max(2, round(_cores(x.device) * per_core)))
    return divided(blocks, tiles), tiles


@cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
