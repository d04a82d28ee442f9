"""mHC's write weights of at most 4 streams: post = 2σ(z), mix = Sinkhorn(exp(z)), forward and backward.

A thread holds a token's whole matrix, N rows of [TOKENS, SIDE], so that threads exchange nothing; SIDE
is N, or 4 for 3 streams, whose last column is empty. The first iteration is in logarithms; after it every row and
column sums to 1/N² or more, and the others divide. The backward pass repeats them, notes by what each divided (2N
numbers per token, in scratch memory), and walks back. A note of the columns [tokens, N] is followed by one of the rows
[N, tokens]: so a warp writes each of them side by side.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _argument(z_ptr, scale_ptr, bias_ptr, t, live, column, first: tl.constexpr, part: tl.constexpr, N: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
    """z and scale · z + bias of N entries from `first` on [TOKENS, SIDE]."""
    exists = column < N
    at = t[:, None] * K + first + column[None, :]
    b_z = tl.load(z_ptr + at, mask=live[:, None] & exists[None, :], other=0.0).to(tl.float32)
    b_bias = tl.load(bias_ptr + first + column, mask=exists, other=0.0).to(tl.float32)
    return b_z, tl.load(scale_ptr + part).to(tl.float32) * b_z + b_bias[None, :]


@triton.jit
def _matrix(z_ptr, scale_ptr, bias_ptr, t, live, column, N: tl.constexpr, K: tl.constexpr):
    """The rows of z, and of the logits."""
    b_z, b_L = (), ()
    for i in tl.static_range(N):
        b_own, b_row = _argument(z_ptr, scale_ptr, bias_ptr, t, live, column, 2 * N + i * N, 2, N, K)
        b_z, b_L = b_z + (b_own,), b_L + (b_row,)
    return b_z, b_L


@triton.jit
def _column_sums(b_p, N: tl.constexpr):
    """Σ over rows [TOKENS, SIDE]."""
    b_sum = b_p[0]
    for i in tl.static_range(1, N):
        b_sum += b_p[i]
    return b_sum


@triton.jit
def _by_columns(b_L, N: tl.constexpr):
    """The logits after the first step, which normalises columns."""
    b_top, b_total, b_new = b_L[0], tl.zeros_like(b_L[0]), ()
    for i in tl.static_range(1, N):
        b_top = tl.maximum(b_top, b_L[i])
    for i in tl.static_range(N):
        b_total += tl.exp(b_L[i] - b_top)
    b_by = b_top + tl.log(b_total)
    for i in tl.static_range(N):
        b_new = b_new + (b_L[i] - b_by,)
    return b_new


@triton.jit
def _by_rows(b_L, column, N: tl.constexpr):
    """exp of the logits after the second step, which normalises rows."""
    b_new = ()
    for i in tl.static_range(N):
        b_row = tl.where((column < N)[None, :], b_L[i], -float("inf"))
        b_row = tl.exp(b_row - tl.max(b_row, 1)[:, None])
        b_new = b_new + (b_row / tl.sum(b_row, 1)[:, None],)
    return b_new


@triton.jit
def _columns_divided(b_p, b_sum, column, N: tl.constexpr):
    b_inverse, b_new = 1.0 / tl.where((column < N)[None, :], b_sum, 1.0), ()
    for i in tl.static_range(N):
        b_new = b_new + (b_p[i] * b_inverse,)
    return b_new


@triton.jit
def _rows_divided(b_p, N: tl.constexpr):
    """The matrix and what its rows summed to."""
    b_new, b_sums = (), ()
    for i in tl.static_range(N):
        b_sum = tl.sum(b_p[i], 1)
        b_new, b_sums = b_new + (b_p[i] * (1.0 / b_sum)[:, None],), b_sums + (b_sum,)
    return b_new, b_sums


@triton.jit
def forward_kernel(
    z_ptr, scale_ptr, bias_ptr, post_ptr, mix_ptr, tokens, iterations,
    N: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    t, column = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, SIDE)
    live = t < tokens
    exists = live[:, None] & (column < N)[None, :]
    _, b_post = _argument(z_ptr, scale_ptr, bias_ptr, t, live, column, N, 1, N, K)
    tl.store(post_ptr + t[:, None] * N + column[None, :], 2 * tl.sigmoid(b_post), mask=exists)
    _, b_L = _matrix(z_ptr, scale_ptr, bias_ptr, t, live, column, N, K)
    b_p = _by_rows(_by_columns(b_L, N), column, N)
    for _ in range(1, iterations):
        b_p = _columns_divided(b_p, _column_sums(b_p, N), column, N)
        b_p, _sums = _rows_divided(b_p, N)
    for i in tl.static_range(N):
        tl.store(mix_ptr + t[:, None] * (N * N) + i * N + column[None, :], b_p[i], mask=exists)


@triton.jit
def _through_rows(b_d, b_p, N: tl.constexpr):
    """The gradient of the logits before a step over rows: d − p Σ d, with p the matrix after it."""
    b_new = ()
    for i in tl.static_range(N):
        b_new = b_new + (b_d[i] - b_p[i] * tl.sum(b_d[i], 1)[:, None],)
    return b_new


@triton.jit
def _through_columns(b_d, b_p, N: tl.constexpr):
    b_sum, b_new = _column_sums(b_d, N), ()
    for i in tl.static_range(N):
        b_new = b_new + (b_d[i] - b_p[i] * b_sum,)
    return b_new


@triton.jit
def _notes(scratch_ptr, turn, tokens, t, live, column, N: tl.constexpr):
    """By what an iteration divided columns [TOKENS, SIDE] and rows, N of [TOKENS]; nothing for a negative one."""
    from_ptr, live, b_rows = scratch_ptr + tl.cast(turn, tl.int64) * tokens * (2 * N), live & (turn >= 0), ()
    for i in tl.static_range(N):
        b_rows = b_rows + (tl.load(from_ptr + (N + i) * tokens + t, mask=live, other=0.0),)
    exists = live[:, None] & (column < N)[None, :]
    return tl.load(from_ptr + t[:, None] * N + column[None, :], mask=exists, other=0.0), b_rows


@triton.jit
def backward_kernel(
    g_post_ptr, g_mix_ptr, z_ptr, scale_ptr, bias_ptr, g_z_ptr, partial_ptr, scratch_ptr, tokens, iterations,
    N: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
    HAS_POST: tl.constexpr, HAS_MIX: tl.constexpr,
):  # fmt: skip
    """The gradient of z; and of scale and bias this program's part, one row [3 + K] of `partial`."""
    t, column = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, SIDE)
    live, is_column = t < tokens, column < N
    exists = live[:, None] & is_column[None, :]
    partial_ptr += tl.program_id(0).to(tl.int64) * (3 + K)
    b_none = tl.zeros([TOKENS, SIDE], tl.float32)
    # pre has no part in it; post = 2σ
    tl.store(g_z_ptr + t[:, None] * K + column[None, :], b_none, mask=exists)
    tl.store(partial_ptr + 3 + column, tl.sum(b_none, 0), mask=is_column)
    b_d = b_none
    b_z, b_post = _argument(z_ptr, scale_ptr, bias_ptr, t, live, column, N, 1, N, K)
    if HAS_POST:
        b_half = tl.sigmoid(b_post)
        b_g = tl.load(g_post_ptr + t[:, None] * N + column[None, :], mask=exists, other=0.0).to(tl.float32)
        b_d = 2 * b_g * b_half * (1 - b_half)
    to_z = b_d * tl.load(scale_ptr + 1).to(tl.float32)
    tl.store(g_z_ptr + t[:, None] * K + N + column[None, :], to_z, mask=exists)
    tl.store(partial_ptr + 3 + N + column, tl.sum(b_d, 0), mask=is_column)
    tl.store(partial_ptr, 0.0)
    tl.store(partial_ptr + 1, tl.sum(tl.sum(b_d * b_z, 1), 0))

    b_z, b_L = _matrix(z_ptr, scale_ptr, bias_ptr, t, live, column, N, K)
    b_d = ()
    if HAS_MIX:
        b_columns = _by_columns(b_L, N)
        b_p = _by_rows(b_columns, column, N)
        for turn in range(1, iterations):
            # one iteration, and by what it divides
            to_ptr = scratch_ptr + tl.cast(turn - 1, tl.int64) * tokens * (2 * N)
            b_sum = _column_sums(b_p, N)
            tl.store(to_ptr + t[:, None] * N + column[None, :], b_sum, mask=exists)
            b_p, b_sums = _rows_divided(_columns_divided(b_p, b_sum, column, N), N)
            for i in tl.static_range(N):
                tl.store(to_ptr + (N + i) * tokens + t, b_sums[i], mask=live)
        tl.debug_barrier()
        # dL = g p, with L the logarithm of the result; then back through the iterations, rows before columns
        for i in tl.static_range(N):
            at = t[:, None] * (N * N) + i * N + column[None, :]
            b_d = b_d + (tl.load(g_mix_ptr + at, mask=exists, other=0.0).to(tl.float32) * b_p[i],)
        b_next = _notes(scratch_ptr, iterations - 2, tokens, t, live, column, N)
        for turn in range(1, iterations):
            b_sum, b_sums = b_next
            b_next = _notes(scratch_ptr, iterations - 2 - turn, tokens, t, live, column, N)  # one iteration ahead
            b_d, b_before = _through_rows(b_d, b_p, N), ()
            for i in tl.static_range(N):
                b_before = b_before + (b_p[i] * b_sums[i][:, None],)
            b_d, b_p = _through_columns(b_d, b_before, N), ()
            for i in tl.static_range(N):
                b_p = b_p + (b_before[i] * b_sum,)
        b_d, b_first = _through_rows(b_d, b_p, N), ()
        for i in tl.static_range(N):
            b_first = b_first + (tl.exp(b_columns[i]),)
        b_d = _through_columns(b_d, b_first, N)
    else:
        for _ in tl.static_range(N):
            b_d = b_d + (b_none,)
    b_through = b_none
    for i in tl.static_range(N):
        b_through += b_d[i] * b_z[i]
        to_z = b_d[i] * tl.load(scale_ptr + 2).to(tl.float32)
        tl.store(g_z_ptr + t[:, None] * K + 2 * N + i * N + column[None, :], to_z, mask=exists)
        tl.store(partial_ptr + 3 + 2 * N + i * N + column, tl.sum(b_d[i], 0), mask=is_column)
    tl.store(partial_ptr + 2, tl.sum(tl.sum(b_through, 1), 0))
