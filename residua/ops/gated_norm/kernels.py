"""GatedNorm on the GPU, forward: one kernel goes over channels and finds the gate's few numbers per row, another goes
over rows and finds the last of them in L2. Rows held in registers between the two were slower from 1280 channels on.

The low-rank gate is small matrix products over the tile (RANK is R rounded up to what they take). y = x·rstd·weight
never enters them: rstd comes out of every sum over channels and the weight goes to the small side, so that their large
operand is x as it was loaded. What the small side is made of is prepared once per call, in the dtype of x.
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
def squash(z, FAST: tl.constexpr):
    """1/(1 + 2^z), in three instructions where the approximate ones of a GPU (2⁻²² at worst) can be named."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;",
            "=f,f",
            [z],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1 / (1 + tl.exp2(z))


@triton.jit
def mask_of(inside, c, C: tl.constexpr, BLOCK: tl.constexpr):
    """Which of a tile exists; without a comparison per channel where BLOCK divides C."""
    if C % BLOCK == 0:
        return inside[:, None]
    else:
        return inside[:, None] & (c < C)[None, :]


@triton.jit
def tile_of(x, row, c, inside, C: tl.constexpr, BLOCK: tl.constexpr):
    """Channels c of the rows; x points to the first row, so that all within the tile is 32-bit arithmetic."""
    return tl.load(x + row[:, None] * C + c[None, :], mask=mask_of(inside, c, C, BLOCK), other=0.0)


@triton.jit
def vector_of(x, c, C: tl.constexpr):
    return tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def matrix_of(small, which: tl.constexpr, c, RANK: tl.constexpr, PITCH: tl.constexpr):
    """Channels c of a prepared matrix as [RANK, BLOCK]."""
    return tl.load(small + which * RANK * PITCH + tl.arange(0, RANK)[:, None] * PITCH + c[None, :])


@triton.jit
def prepare_kernel(
    weight, down, up, small,
    C: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `small`: weight·down, −log2 e·up, weight·up and down, channels last, all of their PITCH."""
    r, c = tl.arange(0, RANK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = (r < R)[:, None] & (c < C)[None, :]
    narrow = tl.load(down + r[:, None] * C + c[None, :], mask=there, other=0.0).to(tl.float32)
    wide = tl.load(up + c[None, :] * R + r[:, None], mask=there, other=0.0).to(tl.float32)
    w = vector_of(weight, c, C)[None, :]
    at = small + r[:, None] * PITCH + c[None, :]
    tl.store(at + WEIGHTED_DOWN * RANK * PITCH, narrow * w)
    tl.store(at + SCALED_UP * RANK * PITCH, wide * NEGATIVE_LOG2_E)
    tl.store(at + WEIGHTED_UP * RANK * PITCH, wide * w)
    tl.store(at + DOWN * RANK * PITCH, narrow)


@triton.jit
def keep(rstds, bottleneck, start, row, inside, rstd, u, RANK: tl.constexpr):
    """rstd and u are kept for the backward pass."""
    tl.store(rstds + start + row, rstd, mask=inside)
    at = bottleneck + start * RANK + row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(at, u.to(bottleneck.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens"])
def project_kernel(
    x, update, added, small, rstds, bottleneck, hidden, tokens, eps,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """rstd, u and hidden = silu(u) of TOKENS rows; if ADDED, of added = x + update, rounded as it is stored."""
    start, row = tl.program_id(0).to(tl.int64) * TOKENS, tl.arange(0, TOKENS)
    inside = row < tokens - start
    square = tl.zeros([TOKENS, BLOCK], tl.float32)
    u = tl.zeros([TOKENS, RANK], tl.float32)
    for first in tl.range(0, C, BLOCK, num_stages=STAGES):
        c = first + tl.arange(0, BLOCK)
        raw = tile_of(x + start * C, row, c, inside, C, BLOCK)
        if ADDED:
            sum = raw.to(tl.float32) + tile_of(update + start * C, row, c, inside, C, BLOCK).to(tl.float32)
            raw = sum.to(raw.dtype)
            at = start * C + row[:, None] * C + c[None, :]
            tl.store(added + at, raw, mask=mask_of(inside, c, C, BLOCK))
        v = raw.to(tl.float32)
        square += v * v
        u = tl.dot(raw, tl.trans(matrix_of(small, WEIGHTED_DOWN, c, RANK, PITCH)), u, input_precision="ieee")
    rstd = tl.rsqrt(tl.sum(square, 1) / C + eps)
    u *= rstd[:, None]
    keep(rstds, bottleneck, start, row, inside, rstd, u, RANK)
    t = u * squash(u * NEGATIVE_LOG2_E, FAST)
    at = hidden + start * RANK + row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(at, t.to(hidden.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["tokens"])
def gate_kernel(
    x, weight, small, rstds, hidden, out, tokens,
    C: tl.constexpr, RANK: tl.constexpr, PITCH: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """BLOCK channels of every P-th tile of rows, last first: `project_kernel` has left the last ones in L2."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, TOKENS)
    at = row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    w = vector_of(weight, c, C)
    up = matrix_of(small, SCALED_UP, c, RANK, PITCH)
    tiles = tl.cdiv(tokens, TOKENS)
    for before in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=STAGES):
        start = (tiles - 1 - before).to(tl.int64) * TOKENS
        inside = row < tokens - start
        t = tl.load(hidden + start * RANK + at, mask=inside[:, None], other=0.0)
        rstd = tl.load(rstds + start + row, mask=inside, other=0.0)
        v = tile_of(x + start * C, row, c, inside, C, BLOCK).to(tl.float32)
        s = squash(tl.dot(t, up, input_precision="ieee"), FAST)
        y = v * rstd[:, None] * (s * w[None, :])
        tl.store(
            out + start * C + row[:, None] * C + c[None, :],
            y.to(out.dtype.element_ty),
            mask=mask_of(inside, c, C, BLOCK),
        )
