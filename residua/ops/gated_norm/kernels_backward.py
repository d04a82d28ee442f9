"""GatedNorm on the GPU, backward: over the channels of a row first, then over the tokens of a channel.

With ŷ = x·rstd, y = ŷ·weight, u = down·y, t = silu(u), s = σ(up·t), y' = y·s and g the gradient of y':

    g_u = silu'(u) · upᵀ(g·y·s(1 − s)),   g_y = g·s + downᵀg_u,   m = mean(ŷ·weight·g_y)
    g_x = rstd·(weight·g_y − ŷ·m),   g_weight = Σ g_y·ŷ,   g_down = Σ g_u yᵀ,   g_up = Σ g·y·s(1 − s) tᵀ

`reduce_kernel` finds g_u and m of every token; of m, the part that comes through the gate is Σ_r g_u·u, so that one
sweep gives both. `spread_kernel` keeps a block of channels and goes over tokens, the sums over tokens in registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.gated_norm.kernels import (
    DOWN,
    NEGATIVE_LOG2_E,
    SCALED_UP,
    WEIGHTED_UP,
    mask_of,
    matrix_of,
    squash,
    tile_of,
    vector_of,
)


@triton.jit(do_not_specialize=["tokens"])
def reduce_kernel(
    g, x, weight, small, rstds, bottleneck, hidden, slope, pull, tokens,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """TOKENS rows: hidden = t, slope = rstd·g_u (both [M, RANK]) and pull = rstd²·m."""
    dtype: tl.constexpr = x.dtype.element_ty
    start, row = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    inside = row < tokens - start
    at = start * RANK + row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    u = tl.load(bottleneck + at, mask=inside[:, None], other=0.0).to(tl.float32)
    sigma = squash(u * NEGATIVE_LOG2_E, FAST)
    t = (u * sigma).to(dtype)
    tl.store(hidden + at, t, mask=inside[:, None])

    through = tl.zeros([TOKENS, BLOCK], tl.float32)
    g_t = tl.zeros([TOKENS, RANK], tl.float32)
    for first in tl.range(0, C, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        v = tile_of(x + start * C, row, c, inside, C, BLOCK).to(tl.float32)
        v *= tile_of(g + start * C, row, c, inside, C, BLOCK).to(tl.float32)
        s = squash(tl.dot(t, matrix_of(small, SCALED_UP, c, RANK, PITCH), input_precision="ieee"), FAST)
        v *= s
        through += v * vector_of(weight, c, C)[None, :]
        wide = tl.trans(matrix_of(small, WEIGHTED_UP, c, RANK, PITCH))
        g_t = tl.dot((v - v * s).to(dtype), wide, g_t, input_precision="ieee")
    rstd = tl.load(rstds + start + row, mask=inside, other=0.0)
    g_u = g_t * rstd[:, None] * (sigma + u * sigma * (1 - sigma))
    mean = (tl.sum(through, 1) * rstd + tl.sum(g_u * u, 1)) / C
    tl.store(slope + at, (g_u * rstd[:, None]).to(dtype), mask=inside[:, None])
    tl.store(pull + start + row, rstd * rstd * mean, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def spread_kernel(
    g, x, residual, weight, small, rstds, hidden, slope, pull, g_x, partial, tokens,
    C: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of every P-th tile of rows: g_x, and this program's part [1 + 2R, C] of three sums over tokens.

    They are the gradient of weight, and those of down and of up transposed, both still to be multiplied by weight.
    If ADDED, g_x also has `residual`, what x is given on another path; the sum is rounded once.
    Tiles come last first: `reduce_kernel` has left the last ones in L2.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, r = tl.arange(0, TOKENS), tl.arange(0, RANK)
    at = row[:, None] * RANK + r[None, :]
    w = vector_of(weight, c, C)
    up, down = matrix_of(small, SCALED_UP, c, RANK, PITCH), matrix_of(small, DOWN, c, RANK, PITCH)
    to_weight = tl.zeros([TOKENS, BLOCK], tl.float32)
    to_down = tl.zeros([RANK, BLOCK], tl.float32)
    to_up = tl.zeros([RANK, BLOCK], tl.float32)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS
        inside = row < tokens - start
        t = tl.load(hidden + start * RANK + at, mask=inside[:, None], other=0.0)
        g_u = tl.load(slope + start * RANK + at, mask=inside[:, None], other=0.0)
        raw = tile_of(x + start * C, row, c, inside, C, BLOCK)
        v = raw.to(tl.float32)
        rstd = tl.load(rstds + start + row, mask=inside, other=0.0)
        back = tl.load(pull + start + row, mask=inside, other=0.0)

        s = squash(tl.dot(t, up, input_precision="ieee"), FAST)
        g_y = tile_of(g + start * C, row, c, inside, C, BLOCK).to(tl.float32) * s * rstd[:, None]
        z = g_y * v
        z = (z - z * s).to(dtype)
        g_y = tl.dot(g_u, down, g_y, input_precision="ieee")
        new = g_y * w[None, :] - v * back[:, None]
        if ADDED:
            new += tile_of(residual + start * C, row, c, inside, C, BLOCK).to(tl.float32)
        tl.store(g_x + start * C + row[:, None] * C + c[None, :], new.to(dtype), mask=mask_of(inside, c, C, BLOCK))
        to_weight += g_y * v
        to_down = tl.dot(tl.trans(g_u), raw, to_down, input_precision="ieee")
        to_up = tl.dot(tl.trans(t), z, to_up, input_precision="ieee")

    mine = partial + tl.program_id(1).to(tl.int64) * (2 * R + 1) * C + c
    tl.store(mine, tl.sum(to_weight, 0), mask=c < C)
    there = (r < R)[:, None] & (c < C)[None, :]
    tl.store(mine[None, :] + (1 + r)[:, None] * C, to_down, mask=there)
    tl.store(mine[None, :] + (1 + R + r)[:, None] * C, to_up, mask=there)


@triton.jit(do_not_specialize=["parts"])
def finish_kernel(
    partial, weight, g_weight, g_down, g_up, parts,
    C: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the three sums: its parts, always added up in the same order, times weight but for weight's own."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = partial + (part * (2 * R + 1) + row)[:, None] * C + c[None, :]
        total += tl.load(at, mask=(part < parts)[:, None] & (c < C)[None, :], other=0.0)
    sum = tl.sum(total, 0)
    scaled = sum * vector_of(weight, c, C)
    tl.store(g_weight + c, sum.to(g_weight.dtype.element_ty), mask=(c < C) & (row == 0))
    tl.store(g_down + (row - 1) * C + c, scaled.to(g_down.dtype.element_ty), mask=(c < C) & (row > 0) & (row <= R))
    tl.store(g_up + c * R + (row - 1 - R), scaled.to(g_up.dtype.element_ty), mask=(c < C) & (row > R))
