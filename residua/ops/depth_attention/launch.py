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

MMA_READERS = 32
"""Most readers to a warp-group of four; see `product_tile`."""


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


def row_tile(width: int) -> dict[str, Any]:
    """For kernels that reduce over whole rows: a row in two pieces, one warp to a token, so no barriers."""
    low = 1 << max(0, (width - 1).bit_length() - 1)
    high = max(power(width - low), min(256, low))
    tile = {"C": width, "LOW": low, "HIGH": high}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16}
    return {**tile, "TOKENS": 1, "num_warps": 1 if width <= 1536 else 4}


def pair_tile(width: int) -> dict[str, Any]:
    """`row_tile` for the kernel that holds two sources and both their gradients."""
    tile = {**row_tile(width), "UNROLL": 1}
    return tile if width <= 1024 or width > 1536 or shared.INTERPRETED else {**tile, "num_warps": 2}


def mix_tile(width: int) -> dict[str, Any]:
    """For kernels that do not reduce over a row."""
    columns = min(256, max(16, power(width)))
    return {"C": width, "TOKENS": 2048 // columns, "COLUMNS": columns, "LANES": 32}


def scores_tile(width: int, readers: int, v: Tensor) -> dict[str, Any]:
    return product_tile(width, readers, v, tokens=128, columns=64, stages=3)


def product_tile(
    width: int, readers: int, v: Tensor, tokens: int = 32, columns: int = 128, stages: int = 2
) -> dict[str, Any]:
    """For kernels that are matrix products between tokens and readers.

    With 64 readers and four warps Triton makes asynchronous products that still read a buffer while its pipeline
    loads the next tile into it (a source that is used both in a product and otherwise gets one buffer too few).
    Two warps have no such products.
    """
    padded = max(16, power(readers))
    tile = {"C": width, "READERS": padded, "NARROW": v.dtype == torch.bfloat16 and not shared.INTERPRETED}
    if shared.INTERPRETED:
        return {**tile, "TOKENS": 16, "COLUMNS": min(64, max(16, power(width)))}
    if padded > MMA_READERS:
        return {**tile, "TOKENS": 32, "COLUMNS": min(32, max(16, power(width))), "num_warps": 2, "num_stages": 3}
    if not tile["NARROW"]:
        tokens, columns, stages = 64, 64, 3
    columns = min(columns, max(16, power(width)))
    return {**tile, "TOKENS": tokens, "COLUMNS": columns, "num_warps": 4, "num_stages": stages}


def shares(x: Tensor, blocks: int, per_core: float) -> tuple[int, int]:
    """Split `blocks` among programs that loop: how many programs, and how many blocks each."""
    tiles = divided(blocks, max(2, round(_cores(x.device) * per_core)))
    return divided(blocks, tiles), tiles


@cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
