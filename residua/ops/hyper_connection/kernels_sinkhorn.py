"""Sinkhorn's normalisation on the GPU: all iterations on chip, forward and backward.

In logarithms an iteration takes a column's and then a row's log-sum-exp off the matrix. Its gradient is
dL − exp(L') Σ dL over the same axis, L' being the matrix after it. The backward pass repeats the iterations, notes what
each took off (2N numbers per token, in a scratch that lives as long as the kernel), and walks back by putting it on.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logsumexp(x, live, AXIS: tl.constexpr):
    """Over one axis of the matrix, kept; 0 where a row or column is only padding."""
    top = tl.where(live, tl.expand_dims(tl.max(x, AXIS), AXIS), 0.0)
    total = tl.expand_dims(tl.sum(tl.exp(x - top), AXIS), AXIS)
    return tl.where(live, tl.log(tl.where(live, total, 1.0)) + top, 0.0)


@triton.jit
def _entries(program, tokens, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    """Offsets of the matrices' entries, which of them exist, and which columns and rows."""
    row = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    out, into = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    at = row[:, None, None] * (N * N) + out * N + into
    return row, at, (row < tokens)[:, None, None] & (out < N) & (into < N), out < N, into < N


@triton.jit
def forward_kernel(x, y, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    _, at, there, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    L = tl.where(is_row & is_column, tl.load(x + at, mask=there, other=0.0).to(tl.float32), -float("inf"))
    for _ in range(iterations):
        L -= _logsumexp(L, is_column, 1)
        L -= _logsumexp(L, is_row, 2)
    tl.store(y + at, tl.exp(L).to(y.dtype.element_ty), mask=there)


@triton.jit
def backward_kernel(g, x, g_x, scratch, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    row, at, there, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    side = tl.arange(0, SIDE)
    note = scratch + row[:, None] * (2 * N) + side[None, :]
    known = (row < tokens)[:, None] & (side < N)[None, :]
    L = tl.where(is_row & is_column, tl.load(x + at, mask=there, other=0.0).to(tl.float32), -float("inf"))
    for k in range(iterations):
        columns = _logsumexp(L, is_column, 1)
        L -= columns
        rows = _logsumexp(L, is_row, 2)
        L -= rows
        to = note + tl.cast(k, tl.int64) * tokens * (2 * N)
        tl.store(to, tl.reshape(columns, [TOKENS, SIDE]), mask=known)
        tl.store(to + N, tl.reshape(rows, [TOKENS, SIDE]), mask=known)
    tl.debug_barrier()
    d = tl.load(g + at, mask=there, other=0.0).to(tl.float32) * tl.exp(L)
    for turn in range(iterations):
        to = note + tl.cast(iterations - 1 - turn, tl.int64) * tokens * (2 * N)
        d -= tl.exp(L) * tl.expand_dims(tl.sum(d, 2), 2)
        L += tl.expand_dims(tl.load(to + N, mask=known, other=0.0), 2)
        d -= tl.exp(L) * tl.expand_dims(tl.sum(d, 1), 1)
        L += tl.expand_dims(tl.load(to, mask=known, other=0.0), 1)
    tl.store(g_x + at, d.to(g_x.dtype.element_ty), mask=there)
