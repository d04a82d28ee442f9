"""Products of decayed keys and queries inside chunks of C tokens, and their gradients, in float32.

    (x, k)_ij = Σ_c x_ic k_jc exp(G_ic − G_jc),   j ≤ i,   for x = k and x = q

A program takes 16 rows of one chunk. For an earlier block of 16 columns it divides the exponent at R, the sum G of the
token before the rows. Then both factors are at most 1 and the rest is a matrix product. In the block on the diagonal it
takes the columns one by one. With P_ij = exp(G_i − G_j), and D, E the gradients of (k, k) and (q, k):

    rows_i = Σ_j D_ij P_ij k_j,   d_q,i = Σ_j E_ij P_ij k_j,   columns_j = Σ_i P_ij (D_ij k_i + E_ij q_i)
    d_k = rows + columns,   d_G = k ⊙ rows + q ⊙ d_q − k ⊙ columns
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(x_ptr, first, K: tl.constexpr, BLOCK: tl.constexpr):
    """16 rows of x [·, K] from `first` on, [16, BLOCK]."""
    t, c = first + tl.arange(0, 16)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(x_ptr + t.to(tl.int64) * K + c, mask=c < K, other=0.0)


@triton.jit
def row_of(x_ptr, row, is_there, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row, [1, BLOCK]; zero if it is not there."""
    c = tl.arange(0, BLOCK)[None, :]
    return tl.load(x_ptr + tl.cast(row, tl.int64) * K + c, mask=(c < K) & is_there, other=0.0)


@triton.jit
def square(x_ptr, chunk, row, column, C: tl.constexpr):
    """Pointers to 16 × 16 elements of matrix `chunk` [C, C]."""
    i, j = row + tl.arange(0, 16)[:, None], column + tl.arange(0, 16)[None, :]
    return x_ptr + (tl.cast(chunk, tl.int64) * C + i) * C + j


@triton.jit
def forward_kernel(
    k_ptr, q_ptr, total_ptr, keys_ptr, queries_ptr, K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """16 rows of (k, k) and (q, k) of one chunk; zero above the diagonal."""
    chunk, a = tl.program_id(0) // (C // 16), tl.program_id(0) % (C // 16)
    start, row = chunk * C, a * 16
    b_k = rows_of(k_ptr, start + row, K, BLOCK)  # [16, BLOCK]
    b_q = rows_of(q_ptr, start + row, K, BLOCK)
    b_g = rows_of(total_ptr, start + row, K, BLOCK)

    # earlier blocks: (x ⊙ exp(G − R)) (k ⊙ exp(R − G))ᵀ
    b_r = row_of(total_ptr, start + row - 1, a > 0, K, BLOCK)
    b_in = tl.exp(b_g - b_r)
    for b in range(0, a):
        b_out = rows_of(k_ptr, start + b * 16, K, BLOCK) * tl.exp(b_r - rows_of(total_ptr, start + b * 16, K, BLOCK))
        b_out = tl.trans(b_out)
        tl.store(square(keys_ptr, chunk, row, b * 16, C), tl.dot(b_k * b_in, b_out, input_precision="ieee"))
        tl.store(square(queries_ptr, chunk, row, b * 16, C), tl.dot(b_q * b_in, b_out, input_precision="ieee"))

    # the block on the diagonal, column by column
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    b_keys = tl.zeros([16, 16], tl.float32)
    b_queries = tl.zeros([16, 16], tl.float32)
    for s in range(0, 16):
        b_p = tl.exp(tl.minimum(b_g - row_of(total_ptr, start + row + s, True, K, BLOCK), 0.0))
        b_p *= row_of(k_ptr, start + row + s, True, K, BLOCK)
        b_keys = tl.where((j == s) & (i >= s), tl.sum(b_k * b_p, 1)[:, None], b_keys)
        b_queries = tl.where((j == s) & (i >= s), tl.sum(b_q * b_p, 1)[:, None], b_queries)
    tl.store(square(keys_ptr, chunk, row, row, C), b_keys)
    tl.store(square(queries_ptr, chunk, row, row, C), b_queries)
    for b in range(a + 1, C // 16):
        tl.store(square(keys_ptr, chunk, row, b * 16, C), tl.zeros([16, 16], tl.float32))
        tl.store(square(queries_ptr, chunk, row, b * 16, C), tl.zeros([16, 16], tl.float32))


@triton.jit
def backward_kernel(
    d_keys_ptr, d_queries_ptr, k_ptr, q_ptr, total_ptr, d_k_ptr, d_q_ptr, d_total_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of 16 tokens of one chunk, as rows and as columns."""
    chunk, a = tl.program_id(0) // (C // 16), tl.program_id(0) % (C // 16)
    start, row = chunk * C, a * 16
    b_k = rows_of(k_ptr, start + row, K, BLOCK)  # [16, BLOCK]
    b_q = rows_of(q_ptr, start + row, K, BLOCK)
    b_g = rows_of(total_ptr, start + row, K, BLOCK)
    b_rows = tl.zeros([16, BLOCK], tl.float32)
    b_dq = tl.zeros([16, BLOCK], tl.float32)
    b_columns = tl.zeros([16, BLOCK], tl.float32)

    # as rows, with earlier blocks of columns
    b_r = row_of(total_ptr, start + row - 1, a > 0, K, BLOCK)
    for b in range(0, a):
        b_out = rows_of(k_ptr, start + b * 16, K, BLOCK) * tl.exp(b_r - rows_of(total_ptr, start + b * 16, K, BLOCK))
        b_rows += tl.dot(tl.load(square(d_keys_ptr, chunk, row, b * 16, C)), b_out, input_precision="ieee")
        b_dq += tl.dot(tl.load(square(d_queries_ptr, chunk, row, b * 16, C)), b_out, input_precision="ieee")
    b_in = tl.exp(b_g - b_r)
    b_rows *= b_in
    b_dq *= b_in

    # as columns, with later blocks of rows
    for b in range(a + 1, C // 16):
        b_r = row_of(total_ptr, start + b * 16 - 1, True, K, BLOCK)
        b_in = tl.exp(rows_of(total_ptr, start + b * 16, K, BLOCK) - b_r)
        b_d = tl.trans(tl.load(square(d_keys_ptr, chunk, b * 16, row, C)))
        b_e = tl.trans(tl.load(square(d_queries_ptr, chunk, b * 16, row, C)))
        b_sum = tl.dot(b_d, rows_of(k_ptr, start + b * 16, K, BLOCK) * b_in, input_precision="ieee")
        b_sum += tl.dot(b_e, rows_of(q_ptr, start + b * 16, K, BLOCK) * b_in, input_precision="ieee")
        b_columns += tl.exp(b_r - b_g) * b_sum

    # the block on the diagonal: token s as a column of all rows, then as a row of all columns
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    b_d = tl.where(i >= j, tl.load(square(d_keys_ptr, chunk, row, row, C)), 0.0)
    b_e = tl.where(i >= j, tl.load(square(d_queries_ptr, chunk, row, row, C)), 0.0)
    for s in range(0, 16):
        b_sg = row_of(total_ptr, start + row + s, True, K, BLOCK)
        b_sk = row_of(k_ptr, start + row + s, True, K, BLOCK)
        b_sq = row_of(q_ptr, start + row + s, True, K, BLOCK)
        b_p = tl.exp(tl.minimum(b_g - b_sg, 0.0)) * b_sk
        b_rows += tl.sum(tl.where(j == s, b_d, 0.0), 1)[:, None] * b_p
        b_dq += tl.sum(tl.where(j == s, b_e, 0.0), 1)[:, None] * b_p
        b_p = tl.exp(tl.minimum(b_sg - b_g, 0.0))
        b_ds = tl.sum(tl.where(i == s, b_d, 0.0), 0)[:, None]
        b_es = tl.sum(tl.where(i == s, b_e, 0.0), 0)[:, None]
        b_columns += b_p * (b_ds * b_sk + b_es * b_sq)

    t, c = start + row + tl.arange(0, 16)[:, None], tl.arange(0, BLOCK)[None, :]
    at = t.to(tl.int64) * K + c
    tl.store(d_k_ptr + at, b_rows + b_columns, mask=c < K)
    tl.store(d_q_ptr + at, b_dq, mask=c < K)
    tl.store(d_total_ptr + at, b_k * (b_rows - b_columns) + b_q * b_dq, mask=c < K)
