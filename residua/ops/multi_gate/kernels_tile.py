"""Helpers of the Multi-Gate kernels: load a tile, widen it, sum it, pick one stream's scalar."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime import fused

INTERPRETED = tl.constexpr(fused.INTERPRETED)


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def wide(b_x):
    """bfloat16 to float32, in pairs: two instructions per pair, where the compiler needs three."""
    if INTERPRETED or b_x.dtype == tl.float32:
        return b_x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """x as it is after being stored; in pairs, for converting single numbers runs at an eighth of the rate."""
    if INTERPRETED or dtype == tl.float32:
        return b_x.to(dtype).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
        "=&r,=&r,r,r",
        [b_x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def stream(x_ptrs, k: tl.constexpr, token, C: tl.constexpr, N: tl.constexpr):
    """The token's row of stream k: in the one tensor [M, N, C], or in the k-th of N [M, C]."""
    if len(x_ptrs) == 1:
        row_ptr = x_ptrs[0] + (token * N + k) * C
    else:
        row_ptr = x_ptrs[k] + token * C
    return row_ptr


@triton.jit
def row(row_ptr, c, C: tl.constexpr, POLICY: tl.constexpr):
    """Channels c of a row in float32, [1, BLOCK]. The first sweep keeps its lines in the cache, the second does not."""
    return wide(tl.load(row_ptr + c, mask=c < C, other=0.0, eviction_policy=POLICY))


@triton.jit
def vector(x_ptr, c, C: tl.constexpr):
    return tl.load(x_ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def fold(b_x, LANES: tl.constexpr):
    """[1, BLOCK] to [1, LANES]: the channels that one thread loads together, summed."""
    return tl.sum(tl.reshape(b_x, [1, LANES, b_x.shape[1] // LANES]), 2)


@triton.jit
def put(b_sums, i, k: tl.constexpr, b_x):
    """Add x [1, LANES] to row k of sums [ROWS, LANES]. Rows are in registers, so nothing is compared at run time."""
    return tl.where(i[:, None] == k, b_sums + b_x, b_sums)


@triton.jit
def pick(b_x, i, k: tl.constexpr):
    """Entry k of x [ROWS]."""
    return tl.sum(tl.where(i == k, b_x, -0.0), 0)


@triton.jit
def scalars(x_ptr, i, N: tl.constexpr):
    """N floats from x on, as [ROWS]: every thread loads them itself, so no exchange between threads is needed."""
    b_out = i * 0.0
    for k in tl.static_range(N):
        b_out = tl.where(i == k, tl.load(x_ptr + k), b_out)
    return b_out
