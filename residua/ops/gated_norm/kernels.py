"""GatedNorm on the GPU, forward:

    rstd = (mean(x²) + eps)^-½,   u = down · (x·rstd·weight),   t = silu(u),   y' = x·rstd·weight · σ(up · t)

`project_kernel` goes over channels and computes rstd, u and t of every row; `gate_kernel` goes over rows, last first,
and finds the last of them in L2. Keeping rows in registers between the two was slower from 1280 channels on.

The low-rank gate is small matrix products over the tile (RANK is R rounded up to what they take). y = x·rstd·weight
never enters them: rstd is factored out of every sum over channels and the weight goes to the small side, so that their
large operand is x as it was loaded. `prepare_kernel` makes the small side once per call, in the dtype of x.
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
