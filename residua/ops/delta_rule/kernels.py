"""Delta rules on the GPU, forward: chunks of C tokens, first in parallel, then in sequence.

With the reference's letters, for one head and a chunk that starts from the state S [K, V]:

    inverse = (I + tril(β_i within_ij k_i·k_j, −1))⁻¹,   reads = tril(within_ij q_i·k_j)        chunk_kernel
    r = β (v − enter ⊙ k S),   u = inverse r                                                    scan_kernel
    o = enter ⊙ q S + reads u,   S' = enter_last S + (leave ⊙ k)ᵀ u,   leave_j = within_last,j

`rates` [6, B·H, N·C] is float32 and holds six numbers per token: enter, leave, β, β enter, the sum G of log decays, and
the number of documents begun inside the chunk. After the last token β is 0.

CHANNELS: with a decay per channel, enter and leave keep only the documents, 0 or 1. `totals` [B·H, N·C, K] holds G, and
the decays have gone into the keys and queries of `decayed` [3, B·H, N·C, K]: e^G ⊙ q, e^G ⊙ k and e^(G_last − G) ⊙ k.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

ENTER, LEAVE, BETA, ERASE, TOTAL, DOCUMENT = (tl.constexpr(i) for i in range(6))


@triton.jit
def tile(x_ptr, start, length, stride_t, C: tl.constexpr, D: tl.constexpr):
    """C tokens of one head from `start` on, [C, D], zero from `length` on."""
    t = start + tl.arange(0, C)[:, None]
    return tl.load(x_ptr + t.to(tl.int64) * stride_t + tl.arange(0, D)[None, :], mask=t < length, other=0.0)


@triton.jit
def store_tile(x_ptr, b_x, start, length, stride_t, C: tl.constexpr, D: tl.constexpr):
    t = start + tl.arange(0, C)[:, None]
    at_ptr = x_ptr + t.to(tl.int64) * stride_t + tl.arange(0, D)[None, :]
    tl.store(at_ptr, b_x.to(x_ptr.dtype.element_ty), mask=t < length)


@triton.jit
def matrix(x_ptr, index, stride_r, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a block [ROWS, COLUMNS] of matrix `index`, whose rows are `stride_r` apart."""
    first_ptr = x_ptr + tl.cast(index, tl.int64) * (ROWS * stride_r)
    return first_ptr + tl.arange(0, ROWS)[:, None] * stride_r + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def transposed(x_ptr, index, stride_r, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`matrix`, as [COLUMNS, ROWS]."""
    first_ptr = x_ptr + tl.cast(index, tl.int64) * (ROWS * stride_r)
    return first_ptr + tl.arange(0, ROWS)[None, :] * stride_r + tl.arange(0, COLUMNS)[:, None]


@triton.jit
def rate(rates_ptr, which: tl.constexpr, row, rows, start, padded, C: tl.constexpr):
    """One of the rates of a chunk, [C]."""
    at = (tl.cast(rows, tl.int64) * which + row) * padded + start
    return tl.load(rates_ptr + at + tl.arange(0, C))


@triton.jit
def decay_between(b_total, b_document, C: tl.constexpr):
    """within [C, C], the diagonal included. Above it the exponent is positive and may overflow, but is not chosen."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    visible = (i >= j) & (b_document[:, None] == b_document[None, :])
    return tl.where(visible, tl.exp(b_total[:, None] - b_total[None, :]), 0.0)


@triton.jit
def across(level, C: tl.constexpr):
    """Pairs of tokens from the two halves of one block of 2^(level + 1), [C, C]; six levels have all pairs of 64."""
    return (tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]) >> level == 1


@triton.jit
def below(level, C: tl.constexpr):
    """Those of them below the diagonal."""
    return across(level, C) & (tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :])


@triton.jit
def decay_to_middle(totals_ptr, b_g, level, K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """exp(−|G − R|) [C, BLOCK] with R the sum G at the end of the first half of each token's block of 2^(level + 1).

    exp(G_i − G_j) = exp(G_i − R) exp(R − G_j) for the pairs of `below`: no factor is above 1, however strong the decay.
    """
    middle = (tl.arange(0, C) >> level + 1 << level + 1) + (1 << level) - 1
    b_r = tl.load(totals_ptr + middle[:, None] * K + tl.arange(0, BLOCK)[None, :])
    return tl.exp(-tl.abs(b_g - b_r))


@triton.jit
def inverted(b_n, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + N)⁻¹ of a strictly lower triangular N [C, C], C = 64, by blocks that double in size.

    D holds the inverses of the blocks on the diagonal. Two neighbours have a block B below them, and

        (A 0; B C)⁻¹ = (A⁻¹ 0; −C⁻¹ B A⁻¹ C⁻¹),   so D ← D − D B D for all pairs at once.

    A series over all of N has fewer products and loses every digit where keys are alike.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_d = tl.where(i == j, 1.0, 0.0) - tl.where(below(0, C), b_n, 0.0)
    for level in tl.static_range(1, 6):
        b_half = tl.dot(b_d, tl.where(below(level, C), b_n, 0.0), input_precision=PRECISION)
        b_d -= tl.dot(b_half, b_d, input_precision=PRECISION)
    return b_d


@triton.jit
def decayed_products(
    q_ptr, k_ptr, g_ptr, totals_ptr, decayed_ptr, each, start, length, stride_qt, stride_kt, stride_gt,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(q, k) and (k, k) of a chunk: (x, k)_ij = Σ_c x_ic k_jc exp(G_ic − G_jc) for j ≤ i. Stores totals and decayed.

    At each level x xᵀ and y xᵀ with x = k ⊙ exp(−|G − R|) and y = q ⊙ exp(−|G − R|) have the pairs of `below`.
    """
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    dtype = k_ptr.dtype.element_ty
    b_qk, b_kk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for first in tl.range(0, K, BLOCK, num_stages=1):
        b_k = tile(k_ptr + first, start, length, stride_kt, C, BLOCK).to(tl.float32)
        b_q = tile(q_ptr + first, start, length, stride_qt, C, BLOCK).to(tl.float32)
        b_g = tl.cumsum(tile(g_ptr + first, start, length, stride_gt, C, BLOCK), 0)  # [C, BLOCK]
        b_enter, b_last = tl.exp(b_g), tl.sum(tl.where(i == C - 1, b_g, 0.0), 0)[None, :]
        store_tile(totals_ptr + first, b_g, 0, C, K, C, BLOCK)
        store_tile(decayed_ptr + first, b_q * b_enter, 0, C, K, C, BLOCK)
        store_tile(decayed_ptr + each + first, b_k * b_enter, 0, C, K, C, BLOCK)
        store_tile(decayed_ptr + 2 * each + first, b_k * tl.exp(b_last - b_g), 0, C, K, C, BLOCK)
        tl.debug_barrier()  # other threads read the totals
        b_qk += tl.where(i == j, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        for level in tl.range(0, 6, num_stages=1):
            b_e = decay_to_middle(totals_ptr + first, b_g, level, K, C, BLOCK)
            b_x = (b_k * b_e).to(dtype)
            b_kk += tl.where(below(level, C), tl.dot(b_x, tl.trans(b_x)), 0.0)
            b_qk += tl.where(below(level, C), tl.dot((b_q * b_e).to(dtype), tl.trans(b_x)), 0.0)
    return b_qk, b_kk


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def chunk_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, begins_ptr, inverse_ptr, reads_ptr, rates_ptr,
    overlap_ptr, totals_ptr, decayed_ptr,
    length, chunks, rows, heads, group, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    K: tl.constexpr, C: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: the matrices that do not depend on the state, and the rates."""
    row, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head, start = tl.cast(row // heads, tl.int64), row % heads, n * C
    t = start + tl.arange(0, C)
    is_token, token = t < length, batch * length + t

    # G, β, and the number of documents begun so far
    b_total = tl.zeros([C], tl.float32)
    if not CHANNELS:
        b_total = tl.cumsum(tl.load(g_ptr + token * heads + head, mask=is_token, other=0.0), 0)
    b_beta = tl.load(beta_ptr + token * heads + head, mask=is_token, other=0.0)
    b_document = tl.zeros([C], tl.int32)
    if DOCUMENTS:
        b_document = tl.cumsum(tl.load(begins_ptr + token, mask=is_token, other=0).to(tl.int32), 0)
    is_last = tl.arange(0, C) == C - 1
    last_total, last_document = tl.sum(tl.where(is_last, b_total, 0.0)), tl.sum(tl.where(is_last, b_document, 0))
    b_enter = tl.where(b_document == 0, tl.exp(b_total), 0.0)
    b_leave = tl.where(b_document == last_document, tl.exp(last_total - b_total), 0.0)
    each, at = tl.cast(rows, tl.int64) * chunks * C, tl.cast(row, tl.int64) * chunks * C + t
    tl.store(rates_ptr + ENTER * each + at, b_enter)
    tl.store(rates_ptr + LEAVE * each + at, b_leave)
    tl.store(rates_ptr + BETA * each + at, b_beta)
    tl.store(rates_ptr + ERASE * each + at, b_beta * b_enter)
    tl.store(rates_ptr + TOTAL * each + at, b_total)
    tl.store(rates_ptr + DOCUMENT * each + at, b_document.to(tl.float32))

    # reads = tril(within ⊙ q kᵀ)
    k_ptr += batch * stride_kb + head // group * stride_kh
    q_ptr += batch * stride_qb + head // group * stride_qh
    if CHANNELS:
        base = tl.cast(tl.program_id(0), tl.int64) * C * K
        b_qk, b_kk = decayed_products(
            q_ptr, k_ptr, g_ptr + (batch * length * heads + head) * K, totals_ptr + base, decayed_ptr + base,
            each * K, start, length, stride_qt, stride_kt, heads * K, K, C, BLOCK,
        )  # fmt: skip
    else:
        b_k = tile(k_ptr, start, length, stride_kt, C, K)
        b_qk = tl.dot(tile(q_ptr, start, length, stride_qt, C, K), tl.trans(b_k))
        b_kk = tl.dot(b_k, tl.trans(b_k))
    b_within = decay_between(b_total, b_document, C)
    b_reads = b_within * b_qk
    tl.store(matrix(reads_ptr, tl.program_id(0), C, C, C), b_reads.to(reads_ptr.dtype.element_ty))

    # inverse = (I + tril(β within ⊙ k kᵀ, −1))⁻¹
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_kk = tl.where(i > j, b_within * b_kk, 0.0)
    if CHANNELS:
        tl.store(matrix(overlap_ptr, tl.program_id(0), C, C, C), b_kk.to(overlap_ptr.dtype.element_ty))
    b_inverse = inverted(b_beta[:, None] * b_kk, C, PRECISION)
    tl.store(matrix(inverse_ptr, tl.program_id(0), C, C, C), b_inverse.to(inverse_ptr.dtype.element_ty))


@triton.jit
def fade_of(rates_ptr, totals_ptr, row, chunks, n, K: tl.constexpr, C: tl.constexpr, CHANNELS: tl.constexpr):
    """enter_last of chunk n: a number, or [1, K]."""
    last = (tl.cast(row, tl.int64) * chunks + n) * C + C - 1
    fade = tl.load(rates_ptr + last)
    if CHANNELS:
        fade = fade * tl.exp(tl.load(totals_ptr + last * K + tl.arange(0, K)))[None, :]
    return fade


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def scan_kernel(
    q_ptr, k_ptr, v_ptr, inverse_ptr, reads_ptr, rates_ptr, out_ptr, totals_ptr, state_ptr,
    o_ptr, last_ptr, states_ptr, u_ptr, length, chunks, rows, heads, group,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    STATE: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one head's values, through all chunks. KEEP stores the state that each chunk meets, and u.

    CHANNELS: q and k are those that enter the chunk, `out` is the k that leaves it, all three in `decayed`.

    Everything is transposed: the state is Sᵀ [BLOCK, K], and so it is stored. Each product's left factor is then the
    last one's result, which stays in registers, and its right factor a tile as it was loaded.
    """
    row, column = tl.program_id(0) // (V // BLOCK), tl.program_id(0) % (V // BLOCK) * BLOCK
    batch, head = tl.cast(row // heads, tl.int64), row % heads
    key, padded = head // group, chunks * C
    q_ptr += batch * stride_qb + key * stride_qh
    k_ptr += batch * stride_kb + key * stride_kh
    out_ptr += batch * stride_kb + key * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh + column
    o_ptr += (batch * length * heads + head) * V + column
    u_ptr += tl.cast(row, tl.int64) * length * V + column
    dtype = k_ptr.dtype.element_ty
    if STATE:
        b_s = tl.load(transposed(state_ptr + column, row, V, K, BLOCK))  # [BLOCK, K]
    else:
        b_s = tl.zeros([BLOCK, K], tl.float32)
    for n in tl.range(0, chunks, num_stages=STAGES):
        start, at = n * C, row * chunks + n
        b_k = tile(k_ptr, start, length, stride_kt, C, K)
        b_q = tile(q_ptr, start, length, stride_qt, C, K)
        b_v = tile(v_ptr, start, length, stride_vt, C, BLOCK)
        b_inverse = tl.load(matrix(inverse_ptr, at, C, C, C))
        b_reads = tl.load(matrix(reads_ptr, at, C, C, C))
        b_enter = rate(rates_ptr, ENTER, row, rows, start, padded, C)[None, :]
        b_leave = rate(rates_ptr, LEAVE, row, rows, start, padded, C)[None, :]
        b_beta = rate(rates_ptr, BETA, row, rows, start, padded, C)[None, :]
        fade = fade_of(rates_ptr, totals_ptr, row, chunks, n, K, C, CHANNELS)
        b_out = tile(out_ptr, start, length, stride_kt, C, K) if CHANNELS else b_k
        b_met = b_s.to(dtype)
        if KEEP:
            tl.store(matrix(states_ptr, at * (V // BLOCK) + column // BLOCK, K, BLOCK, K), b_met)
        # r = β (v − enter ⊙ k S),   u = inverse r
        b_r = b_beta * (tl.trans(b_v).to(tl.float32) - b_enter * tl.dot(b_met, tl.trans(b_k)))
        b_u = tl.dot(b_r.to(dtype), tl.trans(b_inverse))  # [BLOCK, C]
        if KEEP:
            store_tile(u_ptr, tl.trans(b_u.to(dtype)), start, length, V, C, BLOCK)
        # o = enter ⊙ q S + reads u
        b_o = b_enter * tl.dot(b_met, tl.trans(b_q)) + tl.dot(b_u.to(dtype), tl.trans(b_reads))
        store_tile(o_ptr, tl.trans(b_o.to(dtype)), start, length, heads * V, C, BLOCK)
        # S' = enter_last S + (leave ⊙ k)ᵀ u
        b_s = fade * b_s + tl.dot((b_leave * b_u).to(dtype), b_out)
    tl.store(transposed(last_ptr + column, row, V, K, BLOCK), b_s)


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, o_ptr, heads, group,
    stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of BLOCK columns of one head's values; the state is overwritten.

    For decoding, in place of a dozen launches of `reference.step`; not measured alone (`residua bench decode
    outlier-2b-hybrid`).
    """
    row, column = tl.program_id(0) // (V // BLOCK), tl.program_id(0) % (V // BLOCK) * BLOCK
    batch, head = tl.cast(row // heads, tl.int64), row % heads
    i, j = tl.arange(0, K), column + tl.arange(0, BLOCK)
    b_q = tl.load(q_ptr + batch * stride_qb + head // group * stride_qh + i).to(tl.float32)  # [K]
    b_k = tl.load(k_ptr + batch * stride_kb + head // group * stride_kh + i).to(tl.float32)
    b_v = tl.load(v_ptr + batch * stride_vb + head * stride_vh + j).to(tl.float32)  # [BLOCK]
    # S ← α S,   u = β (v − Sᵀk),   S ← S + k uᵀ,   o = Sᵀq
    at_ptr = matrix(state_ptr + column, row, V, K, BLOCK)
    b_s = tl.exp(tl.load(g_ptr + row)) * tl.load(at_ptr)  # [K, BLOCK]
    b_u = tl.load(beta_ptr + row) * (b_v - tl.sum(b_s * b_k[:, None], 0))
    b_s += b_k[:, None] * b_u[None, :]
    tl.store(at_ptr, b_s)
    b_o = tl.sum(b_s * b_q[:, None], 0)
    tl.store(o_ptr + tl.cast(row, tl.int64) * V + j, b_o.to(o_ptr.dtype.element_ty))
