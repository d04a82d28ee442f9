"""Tile sizes for the kernels of attention over depth, separate from the many launches in `launch.py`.

A source is [..., C], with tokens as all leading axes; per-token scalars are fp32 rows of `pitch(tokens)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import cdiv, next_power_of_2
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors

CHUNK = 32
"""Most readers per matrix product; see `product_tile`."""


def pitch(tokens: int) -> int:
    """Length of a row of per-token scalars: every row starts 16-byte aligned."""
    return (tokens + 15) // 16 * 16


def narrow(x: Tensor) -> bool:
    """Whether products use bf16, like x; the interpreter does not support it."""
    return x.dtype == torch.bfloat16 and not INTERPRETED


UNROLL = 2
"""Rows in flight at once; more were slower for any number of sources, since registers bound these kernels."""


NUMBERS = {"TOKENS": 64, "LANES": 8}
"""The tile of kernels that process only per-token scalars: tokens, and sources or readers."""


SLOPES = {"TOKENS": 64, "LANES": 4, "num_warps": 8}
"""The same for several sources per token at once, and therefore fewer readers."""


def row_tile(width: int) -> dict[str, Any]:
    """For kernels that reduce over whole rows: a row in two pieces and one warp per token, which avoids barriers."""
    low = 1 << max(0, (width - 1).bit_length() - 1)
    high = max(next_power_of_2(width - low), min(256, low))
    tile = {"C": width, "LOW": low, "HIGH": high}
    if INTERPRETED:
        return {**tile, "TOKENS": 16}
    return {**tile, "TOKENS": 1, "num_warps": 1 if width <= 1536 else 4}


def piece_tile(v: Tensor, readers: int) -> dict[str, Any]:
    """For the kernel that holds a token's v and rows of its readers: rows in pieces of equal length, and few warps.

    A thread can hold about 220 fp32 numbers, and warps that share a row must synchronise. Rows are loaded two steps
    ahead if they fit.
    """
    width = v.shape[-1]
    if INTERPRETED:
        piece = min(64, max(16, next_power_of_2(width)))
        tile = {"C": width, "PIECE": piece, "PIECES": cdiv(width, piece), "TOKENS": 16}
        return {**tile, "TOGETHER": False, "STAGES": 1}
    warps = next(n for n in (1, 2, 4, 8, 16) if (3 * readers + 2) * width <= n * 32 * 220 or n == 16)
    piece = min(next_power_of_2(width), 256 if width % 512 else 256 * max(1, warps // 2))
    tile = {"C": width, "PIECE": piece, "PIECES": cdiv(width, piece), "TOKENS": 1}
    ahead = 2 * (readers + 2) * tile["PIECES"] * piece * v.element_size()
    return {**tile, "TOGETHER": warps > 1, "STAGES": 3 if ahead <= 100_000 else 1, "num_warps": warps}


def mix_tile(width: int) -> dict[str, Any]:
    """For kernels that do not reduce over a row."""
    columns = min(256, max(16, next_power_of_2(width)))
    return {"C": width, "TOKENS": 2048 // columns, "COLUMNS": columns}


def stack_tile(v: Tensor, results: int, columns: int, stages: int) -> dict[str, Any]:
    """For kernels that are matrix products over a stack of rows, one product and one warp per token.

    `columns` and `stages` were the fastest on an H200 from 768 to 2,048 channels; float32 has room for fewer columns.
    """
    width = v.shape[-1]
    tile = {"C": width, "NARROW": narrow(v), "ROWS": 16, "PADDED": max(8, next_power_of_2(results))}
    if INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, next_power_of_2(width)))}
    columns = min(columns if narrow(v) else 64, max(16, next_power_of_2(width)))
    return {**tile, "TOKENS": 1, "COLUMNS": columns, "num_warps": 1, "num_stages": stages}


FEW_TOKENS = 16_384
"""Below this, tiles of scores have half as many tokens, so that every multiprocessor gets some."""


def scores_tile(width: int, readers: int, u: Tensor, tokens: int) -> dict[str, Any]:
    at_once = 128 if tokens >= FEW_TOKENS else 64
    return product_tile(width, readers, u, tokens=at_once, columns=64, warps=4, stages=4, room=4)


def scores_gradient_tile(width: int, readers: int, v: Tensor) -> dict[str, Any]:
    return product_tile(width, readers, v, 32 if readers <= CHUNK else 16, columns=128, warps=8, stages=3, room=2)


def product_tile(
    width: int, readers: int, factor: Tensor, tokens: int, columns: int, warps: int, stages: int, room: int
) -> dict[str, Any]:
    """For kernels that are matrix products between tokens and readers, CHUNKS of them.

    With 64 readers per product, Triton emits asynchronous products that still read a buffer while its pipeline loads
    the next tile into it: a source used both in a product and elsewhere gets one buffer too few. With 32 it does not.
    The sums of all chunks stay in registers; tiles are smaller if `room` is insufficient.
    """
    chunks = cdiv(readers, CHUNK)
    tile = {"C": width, "READERS": min(CHUNK, max(16, next_power_of_2(readers))), "CHUNKS": chunks}
    tile["NARROW"] = narrow(factor)
    if INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, next_power_of_2(width)))}
    if not tile["NARROW"]:
        most, warps = (64, 4) if chunks == 1 else (32, 8)
        tokens, columns, stages, room = min(tokens, most), 64, 3, 3
    smaller = next_power_of_2(cdiv(chunks, room))
    tokens, columns = max(16, tokens // smaller), max(16, min(columns // smaller, next_power_of_2(width)))
    warps = max(4, warps // smaller)
    return {**tile, "TOKENS": tokens, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


def shares(x: Tensor, blocks: int, per_core: float) -> tuple[int, int]:
    """Split `blocks` among programs that loop: how many programs, and how many blocks each."""
    tiles = cdiv(blocks, max(2, round(multiprocessors(x) * per_core)))
    return cdiv(blocks, tiles), tiles
