"""GatedNorm on the GPU. Forward:

    rstd = (mean(x²) + eps)^-½,   u = down · (x·rstd·weight),   t = silu(u),   y' = x·rstd·weight · σ(up · t)

`project_kernel` loops over channels and computes rstd, u and t of every row; `gate_kernel` loops over rows, last first,
because L2 still holds the last ones. Keeping rows in registers between the two was slower from 1280 channels on.

The low-rank gate consists of small matrix products over the tile (RANK is R rounded up to a supported size). They never
use y = x·rstd·weight: rstd is factored out of every sum over channels, and the small operand absorbs the weight, so the
large operand is x as loaded. `prepare_kernel` computes the small operand once per call, in the dtype of x.

Backward: over the channels of a row first, then over the tokens of a channel.

With ŷ = x·rstd, y = ŷ·weight, u = down·y, t = silu(u), s = σ(up·t), y' = y·s and g the gradient of y':

    g_u = silu'(u) · upᵀ(g·y·s(1 − s)),   g_y = g·s + downᵀg_u,   m = mean(ŷ·weight·g_y)
    g_x = rstd·(weight·g_y − ŷ·m),   g_weight = Σ g_y·ŷ,   g_down = Σ g_u yᵀ,   g_up = Σ g·y·s(1 − s) tᵀ

`reduce_kernel` computes g_u and m of every token; the part of m that comes through the gate is Σ_r g_u·u, so one sweep
gives both. `spread_kernel` keeps a block of channels and goes over tokens, with the sums over tokens in registers.
`finish_kernel` adds up these sums.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

# The matrices of `small` [4, RANK, PITCH], zero beyond R and C. σ(z) is found as 1/(1 + 2^(−z·log2 e)), and the gate's
# inner product is scaled by −log2 e on its small side.
WEIGHTED_DOWN = tl.constexpr(0)
SCALED_UP = tl.constexpr(1)
WEIGHTED_UP = tl.constexpr(2)
DOWN = tl.constexpr(3)
NEGATIVE_LOG2_E = tl.constexpr(-1.4426950408889634)


@triton.jit
def squash(b_z, FAST: tl.constexpr):
    """1/(1 + 2^z); FAST: in three approximate instructions of the GPU, with an error of 2⁻²² at worst."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
            "=f,f",
            [b_z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1 / (1 + tl.exp2(b_z))


@triton.jit
def mask_of(live, c, C: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a tile [TOKENS, BLOCK]; without a comparison per channel where BLOCK divides C."""
    if C % BLOCK == 0:
        return live[:, None]
    else:
        return live[:, None] & (c < C)[None, :]


@triton.jit
def tile_of(x_ptr, t, c, live, C: tl.constexpr, BLOCK: tl.constexpr):
    """Channels c of the rows t, [TOKENS, BLOCK]; x_ptr points to the first row, so that offsets fit in 32 bits."""
    return tl.load(x_ptr + t[:, None] * C + c[None, :], mask=mask_of(live, c, C, BLOCK), other=0.0)


@triton.jit
def vector_of(x_ptr, c, C: tl.constexpr):
    return tl.load(x_ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def matrix_of(small_ptr, which: tl.constexpr, c, RANK: tl.constexpr, PITCH: tl.constexpr):
    """Channels c of a prepared matrix as [RANK, BLOCK]."""
    return tl.load(small_ptr + which * RANK * PITCH + tl.arange(0, RANK)[:, None] * PITCH + c[None, :])


@triton.jit
def prepare_kernel(
    weight_ptr, down_ptr, up_ptr, small_ptr,
    C: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """small [4, RANK, PITCH] = weight·down, −log2 e·up, weight·up and down, with channels last."""
    r, c = tl.arange(0, RANK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (r < R)[:, None] & (c < C)[None, :]
    b_down = tl.load(down_ptr + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)  # [RANK, BLOCK]
    b_up = tl.load(up_ptr + c[None, :] * R + r[:, None], mask=mask, other=0.0).to(tl.float32)  # [RANK, BLOCK]
    b_w = vector_of(weight_ptr, c, C)[None, :]  # [1, BLOCK]
    out_ptr = small_ptr + r[:, None] * PITCH + c[None, :]
    tl.store(out_ptr + WEIGHTED_DOWN * RANK * PITCH, b_down * b_w)
    tl.store(out_ptr + SCALED_UP * RANK * PITCH, b_up * NEGATIVE_LOG2_E)
    tl.store(out_ptr + WEIGHTED_UP * RANK * PITCH, b_up * b_w)
    tl.store(out_ptr + DOWN * RANK * PITCH, b_down)


@triton.jit
def keep(rstd_ptr, u_ptr, start, t, live, b_rstd, b_u, RANK: tl.constexpr):
    """Keep rstd [TOKENS] and u [TOKENS, RANK] for the backward pass."""
    tl.store(rstd_ptr + start + t, b_rstd, mask=live)
    out_ptr = u_ptr + start * RANK + t[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(out_ptr, b_u.to(u_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def project_kernel(
    x_ptr, update_ptr, added_ptr, small_ptr, rstd_ptr, u_ptr, t_ptr, tokens, eps,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """rstd, u and t = silu(u) of TOKENS rows; if ADDED, of added = x + update, rounded as it is stored."""
    start, t = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    live = t < tokens - start
    b_square = tl.zeros([TOKENS, BLOCK], tl.float32)
    b_u = tl.zeros([TOKENS, RANK], tl.float32)
    for first in tl.range(0, C, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        # x, or x + update rounded as it is stored
        b_x = tile_of(x_ptr + start * C, t, c, live, C, BLOCK)  # [TOKENS, BLOCK]
        if ADDED:
            b_sum = b_x.to(tl.float32) + tile_of(update_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)
            b_x = b_sum.to(b_x.dtype)
            at = start * C + t[:, None] * C + c[None, :]
            tl.store(added_ptr + at, b_x, mask=mask_of(live, c, C, BLOCK))
        # Σ x² and x · (weight·down)ᵀ
        b_v = b_x.to(tl.float32)
        b_square += b_v * b_v
        b_u = tl.dot(b_x, tl.trans(matrix_of(small_ptr, WEIGHTED_DOWN, c, RANK, PITCH)), b_u, input_precision="ieee")
    # rstd, u = rstd · Σ, t = silu(u)
    b_rstd = tl.rsqrt(tl.sum(b_square, 1) / C + eps)  # [TOKENS]
    b_u *= b_rstd[:, None]
    keep(rstd_ptr, u_ptr, start, t, live, b_rstd, b_u, RANK)
    b_t = b_u * squash(b_u * NEGATIVE_LOG2_E, FAST)  # [TOKENS, RANK]
    at = t_ptr + start * RANK + t[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(at, b_t.to(t_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(
    x_ptr, weight_ptr, small_ptr, rstd_ptr, t_ptr, out_ptr, tokens,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of every P-th tile of rows, last first: `project_kernel` has left the last ones in L2."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.arange(0, TOKENS)
    at = t[:, None] * RANK + tl.arange(0, RANK)[None, :]
    b_w = vector_of(weight_ptr, c, C)
    b_up = matrix_of(small_ptr, SCALED_UP, c, RANK, PITCH)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS
        live = t < tokens - start
        b_t = tl.load(t_ptr + start * RANK + at, mask=live[:, None], other=0.0)  # [TOKENS, RANK]
        b_rstd = tl.load(rstd_ptr + start + t, mask=live, other=0.0)
        b_x = tile_of(x_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
        # s = σ(up · t), y' = x·rstd·weight·s
        b_s = squash(tl.dot(b_t, b_up, input_precision="ieee"), FAST)  # [TOKENS, BLOCK]
        b_y = b_x * b_rstd[:, None] * (b_s * b_w[None, :])
        tl.store(
            out_ptr + start * C + t[:, None] * C + c[None, :],
            b_y.to(out_ptr.dtype.element_ty),
            mask=mask_of(live, c, C, BLOCK),
        )


@triton.jit(do_not_specialize=["tokens"])
def reduce_kernel(
    g_ptr, x_ptr, weight_ptr, small_ptr, rstd_ptr, u_ptr, t_ptr, slope_ptr, pull_ptr, tokens,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """TOKENS rows: t and slope = rstd·g_u (both [M, RANK]), and pull = rstd²·m [M]."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    start, t = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    live = t < tokens - start
    at = start * RANK + t[:, None] * RANK + tl.arange(0, RANK)[None, :]
    b_u = tl.load(u_ptr + at, mask=live[:, None], other=0.0).to(tl.float32)  # [TOKENS, RANK]
    # t = silu(u) = u·σ(u)
    b_sigma = squash(b_u * NEGATIVE_LOG2_E, FAST)
    b_t = (b_u * b_sigma).to(dtype)
    tl.store(t_ptr + at, b_t, mask=live[:, None])

    b_through = tl.zeros([TOKENS, BLOCK], tl.float32)
    b_g_t = tl.zeros([TOKENS, RANK], tl.float32)
    for first in tl.range(0, C, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        b_v = tile_of(x_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)  # [TOKENS, BLOCK]
        b_v *= tile_of(g_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)
        # s = σ(up · t); v becomes x·g·s
        b_s = squash(tl.dot(b_t, matrix_of(small_ptr, SCALED_UP, c, RANK, PITCH), input_precision="ieee"), FAST)
        b_v *= b_s
        # Σ x·weight·g·s, m's part without the gate
        b_through += b_v * vector_of(weight_ptr, c, C)[None, :]
        # g_t += upᵀ(g·y·s(1 − s)), without rstd
        b_up = tl.trans(matrix_of(small_ptr, WEIGHTED_UP, c, RANK, PITCH))
        b_g_t = tl.dot((b_v - b_v * b_s).to(dtype), b_up, b_g_t, input_precision="ieee")
    b_rstd = tl.load(rstd_ptr + start + t, mask=live, other=0.0)
    # g_u = silu'(u)·g_t, m
    b_g_u = b_g_t * b_rstd[:, None] * (b_sigma + b_u * b_sigma * (1 - b_sigma))
    b_m = (tl.sum(b_through, 1) * b_rstd + tl.sum(b_g_u * b_u, 1)) / C  # [TOKENS]
    tl.store(slope_ptr + at, (b_g_u * b_rstd[:, None]).to(dtype), mask=live[:, None])
    tl.store(pull_ptr + start + t, b_rstd * b_rstd * b_m, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def spread_kernel(
    g_ptr, x_ptr, residual_ptr, weight_ptr, small_ptr, rstd_ptr, t_ptr, slope_ptr, pull_ptr, g_x_ptr, partial_ptr,
    tokens,
    C: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of every P-th tile of rows: g_x, and this program's part [1 + 2R, C] of three sums over tokens.

    They are the gradient of weight, and those of down and of up transposed, both still to be multiplied by weight.
    If ADDED, g_x includes `residual`, the gradient of x on another path; the sum is rounded once.
    Tiles are taken last first: `reduce_kernel` has left the last ones in L2.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t, r = tl.arange(0, TOKENS), tl.arange(0, RANK)
    at = t[:, None] * RANK + r[None, :]
    b_w = vector_of(weight_ptr, c, C)
    b_up, b_down = matrix_of(small_ptr, SCALED_UP, c, RANK, PITCH), matrix_of(small_ptr, DOWN, c, RANK, PITCH)
    b_to_weight = tl.zeros([TOKENS, BLOCK], tl.float32)
    b_to_down = tl.zeros([RANK, BLOCK], tl.float32)
    b_to_up = tl.zeros([RANK, BLOCK], tl.float32)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS
        live = t < tokens - start
        b_t = tl.load(t_ptr + start * RANK + at, mask=live[:, None], other=0.0)  # [TOKENS, RANK]
        b_g_u = tl.load(slope_ptr + start * RANK + at, mask=live[:, None], other=0.0)  # [TOKENS, RANK]
        b_x = tile_of(x_ptr + start * C, t, c, live, C, BLOCK)  # [TOKENS, BLOCK]
        b_v = b_x.to(tl.float32)
        b_rstd = tl.load(rstd_ptr + start + t, mask=live, other=0.0)
        b_pull = tl.load(pull_ptr + start + t, mask=live, other=0.0)

        # rstd·g·s, and z = rstd·g·x·s(1 − s), up's gradient without weight and t
        b_s = squash(tl.dot(b_t, b_up, input_precision="ieee"), FAST)
        b_g_y = tile_of(g_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32) * b_s * b_rstd[:, None]
        b_z = b_g_y * b_v
        b_z = (b_z - b_z * b_s).to(dtype)
        # rstd·g_y = rstd·(g·s + downᵀg_u)
        b_g_y = tl.dot(b_g_u, b_down, b_g_y, input_precision="ieee")
        # g_x = rstd·weight·g_y − x·rstd²·m + residual
        b_g_x = b_g_y * b_w[None, :] - b_v * b_pull[:, None]  # [TOKENS, BLOCK]
        if ADDED:
            b_g_x += tile_of(residual_ptr + start * C, t, c, live, C, BLOCK).to(tl.float32)
        tl.store(g_x_ptr + start * C + t[:, None] * C + c[None, :], b_g_x.to(dtype), mask=mask_of(live, c, C, BLOCK))
        # the three sums over tokens
        b_to_weight += b_g_y * b_v
        b_to_down = tl.dot(tl.trans(b_g_u), b_x, b_to_down, input_precision="ieee")
        b_to_up = tl.dot(tl.trans(b_t), b_z, b_to_up, input_precision="ieee")

    mine_ptr = partial_ptr + tl.program_id(1).to(tl.int64) * (2 * R + 1) * C + c
    tl.store(mine_ptr, tl.sum(b_to_weight, 0), mask=c < C)
    mask = (r < R)[:, None] & (c < C)[None, :]
    tl.store(mine_ptr[None, :] + (1 + r)[:, None] * C, b_to_down, mask=mask)
    tl.store(mine_ptr[None, :] + (1 + R + r)[:, None] * C, b_to_up, mask=mask)


@triton.jit(do_not_specialize=["parts"])
def finish_kernel(
    partial_ptr, weight_ptr, g_weight_ptr, g_down_ptr, g_up_ptr, parts,
    C: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of the three sums: its parts, added in a fixed order, times weight except for weight's own gradient."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        part_ptr = partial_ptr + (part * (2 * R + 1) + row)[:, None] * C + c[None, :]
        b_total += tl.load(part_ptr, mask=(part < parts)[:, None] & (c < C)[None, :], other=0.0)
    b_sum = tl.sum(b_total, 0)
    b_scaled = b_sum * vector_of(weight_ptr, c, C)
    tl.store(g_weight_ptr + c, b_sum.to(g_weight_ptr.dtype.element_ty), mask=(c < C) & (row == 0))
    tl.store(
        g_down_ptr + (row - 1) * C + c, b_scaled.to(g_down_ptr.dtype.element_ty), mask=(c < C) & (row > 0) & (row <= R)
    )
    tl.store(g_up_ptr + c * R + (row - 1 - R), b_scaled.to(g_up_ptr.dtype.element_ty), mask=(c < C) & (row > R))
