"""What the kernels of Multi-Gate Residuals do with a tile: load it, widen it, sum it, pick a stream's scalar."""

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
def wide(x):
    """bfloat16 to float32, two at a time: two instructions to a pair, where the compiler takes three."""
    if INTERPRETED or x.dtype == tl.float32:
        return x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x as it is after being stored; in pairs, for the conversion of a single number runs at an eighth of the rate."""
    if INTERPRETED or dtype == tl.float32:
        return x.to(dtype).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
        "=&r,=&r,r,r",
        [x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def stream(tensors, k: tl.constexpr, token, C: tl.constexpr, N: tl.constexpr):
    """The token's row of stream k: in the one tensor [M, N, C], or in the k-th of N [M, C]."""
    if len(tensors) == 1:
        x = tensors[0] + (token * N + k) * C
    else:
        x = tensors[k] + token * C
    return x


@triton.jit
def row(x, c, C: tl.constexpr, POLICY: tl.constexpr):
    """Channels c of a row, in float32. The first sweep wants its lines to stay in the cache, the second not."""
    return wide(tl.load(x + c, mask=c < C, other=0.0, eviction_policy=POLICY))


@triton.jit
def vector(x, c, C: tl.constexpr):
    return tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def fold(x, LANES: tl.constexpr):
    """[1, BLOCK] to [1, LANES]: the channels that one thread loads together, summed."""
    return tl.sum(tl.reshape(x, [1, LANES, x.shape[1] // LANES]), 2)


@triton.jit
def put(sums, i, k: tl.constexpr, x):
    """Add x [1, LANES] to row k of sums [ROWS, LANES]. Rows lie in registers: nothing is compared at run time."""
    return tl.where(i[:, None] == k, sums + x, sums)


@triton.jit
def pick(x, i, k: tl.constexpr):
    """Entry k of x [ROWS]."""
    return tl.sum(tl.where(i == k, x, -0.0), 0)


@triton.jit
def scalars(x, i, N: tl.constexpr):
    """N floats from x on, as [ROWS]: the same in every thread, so that no thread has to hand them to another."""
    out = i * 0.0
    for k in tl.static_range(N):
        out = tl.where(i == k, tl.load(x + k), out)
    return out
