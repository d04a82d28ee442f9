"""Sinkhorn's normalisation on the GPU: all iterations on chip, forward and backward.

In logarithms, an iteration subtracts from the matrix L the log-sum-exp of its columns, then that of its rows. The
gradient of each is dL − exp(L') Σ dL over the same axis, with L' the matrix after it. The backward pass repeats the
iterations, stores what each subtracted (2N numbers per token, in scratch memory), and walks back by adding it again.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logsumexp(b_x, live, AXIS: tl.constexpr):
    """Over one axis of the matrix, kept; 0 where a row or column is only padding."""
    b_top = tl.where(live, tl.expand_dims(tl.max(b_x, AXIS), AXIS), 0.0)
    b_total = tl.expand_dims(tl.sum(tl.exp(b_x - b_top), AXIS), AXIS)
    return tl.where(live, tl.log(tl.where(live, b_total, 1.0)) + b_top, 0.0)


@triton.jit
def _entries(program, tokens, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    """Offsets of the matrices' entries, which of them exist, and which columns and rows."""
    row = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    out, into = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    at = row[:, None, None] * (N * N) + out * N + into
    return row, at, (row < tokens)[:, None, None] & (out < N) & (into < N), out < N, into < N


@triton.jit
def forward_kernel(x_ptr, y_ptr, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    _, at, mask, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    b_L = tl.where(
        is_row & is_column, tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), -float("inf")
    )  # [TOKENS, SIDE, SIDE]
    for _ in range(iterations):
        b_L -= _logsumexp(b_L, is_column, 1)
        b_L -= _logsumexp(b_L, is_row, 2)
    tl.store(y_ptr + at, tl.exp(b_L).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    g_ptr, x_ptr, g_x_ptr, scratch_ptr, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr
):
    t, at, mask, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    side = tl.arange(0, SIDE)
    note_ptr = scratch_ptr + t[:, None] * (2 * N) + side[None, :]
    known = (t < tokens)[:, None] & (side < N)[None, :]
    b_L = tl.where(
        is_row & is_column, tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), -float("inf")
    )  # [TOKENS, SIDE, SIDE]
    for k in range(iterations):
        # one iteration, and what it subtracts
        b_columns = _logsumexp(b_L, is_column, 1)
        b_L -= b_columns
        b_rows = _logsumexp(b_L, is_row, 2)
        b_L -= b_rows
        to_ptr = note_ptr + tl.cast(k, tl.int64) * tokens * (2 * N)
        tl.store(to_ptr, tl.reshape(b_columns, [TOKENS, SIDE]), mask=known)
        tl.store(to_ptr + N, tl.reshape(b_rows, [TOKENS, SIDE]), mask=known)
    tl.debug_barrier()
    # y = exp(L), so dL = g·y; then back through the iterations, rows before columns
    b_d = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32) * tl.exp(b_L)
    for turn in range(iterations):
        to_ptr = note_ptr + tl.cast(iterations - 1 - turn, tl.int64) * tokens * (2 * N)
        b_d -= tl.exp(b_L) * tl.expand_dims(tl.sum(b_d, 2), 2)
        b_L += tl.expand_dims(tl.load(to_ptr + N, mask=known, other=0.0), 2)
        b_d -= tl.exp(b_L) * tl.expand_dims(tl.sum(b_d, 1), 1)
        b_L += tl.expand_dims(tl.load(to_ptr, mask=known, other=0.0), 1)
    tl.store(g_x_ptr + at, b_d.to(g_x_ptr.dtype.element_ty), mask=mask)
