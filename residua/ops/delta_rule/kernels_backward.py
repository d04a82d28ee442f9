"""Delta rules on the GPU, backward: the states' gradients from the last chunk to the first, then all others.

With kernels.py's letters, for a chunk whose successor's state has the gradient dS':

    du = readsᵀ do + leave ⊙ k dS',   dr = inverseᵀ du                                          scan_kernel
    dS = enter_last dS' + qᵀ (enter ⊙ do) − kᵀ (β enter ⊙ dr)
    dv = β dr,   dβ = Σ_v dr (v − enter ⊙ k S) + …,   dN = −tril(dr uᵀ, −1),   dq, dk, dG       gradient_kernel

where N = β within ⊙ k kᵀ and the inverse is (I + N)⁻¹: u = (I + N)⁻¹ r gives dr and dN without a gradient of the
inverse. The forward pass stores u and the state that each chunk starts from. CHANNELS is as in kernels.py; two kernels
then replace gradient_kernel, which would need too many registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.delta_rule.kernels import (
    BETA,
    DOCUMENT,
    ENTER,
    ERASE,
    LEAVE,
    TOTAL,
    across,
    decay_between,
    decay_to_middle,
    fade_of,
    matrix,
    rate,
    store_tile,
    tile,
    transposed,
)


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def scan_kernel(
    q_ptr, k_ptr, do_ptr, inverse_ptr, reads_ptr, rates_ptr, out_ptr, totals_ptr, d_last_ptr,
    dr_ptr, d_state_ptr, d_states_ptr, length, chunks, rows, heads, group,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    LAST: tl.constexpr, STATE: tl.constexpr, STAGES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of one head's values, through all chunks backwards: dr [B·H, T, V] and every chunk's dS'.

    Transposed, as the forward scan.
    """
    row, column = tl.program_id(0) // (V // BLOCK), tl.program_id(0) % (V // BLOCK) * BLOCK
    batch, head = tl.cast(row // heads, tl.int64), row % heads
    key, padded = head // group, chunks * C
    q_ptr += batch * stride_qb + key * stride_qh
    k_ptr += batch * stride_kb + key * stride_kh
    out_ptr += batch * stride_kb + key * stride_kh
    do_ptr += batch * stride_ob + head * stride_oh + column
    dr_ptr += tl.cast(row, tl.int64) * length * V + column
    dtype = k_ptr.dtype.element_ty
    if LAST:
        b_ds = tl.load(transposed(d_last_ptr + column, row, V, K, BLOCK))  # [BLOCK, K]
    else:
        b_ds = tl.zeros([BLOCK, K], tl.float32)
    for left in tl.range(0, chunks, num_stages=STAGES):
        n = chunks - 1 - left
        start, at = n * C, row * chunks + n
        b_k = tile(k_ptr, start, length, stride_kt, C, K)
        b_q = tile(q_ptr, start, length, stride_qt, C, K)
        b_do = tl.trans(tile(do_ptr, start, length, stride_ot, C, BLOCK))  # [BLOCK, C]
        b_inverse = tl.load(matrix(inverse_ptr, at, C, C, C))
        b_reads = tl.load(matrix(reads_ptr, at, C, C, C))
        b_enter = rate(rates_ptr, ENTER, row, rows, start, padded, C)[None, :]
        b_leave = rate(rates_ptr, LEAVE, row, rows, start, padded, C)[None, :]
        b_erase = rate(rates_ptr, ERASE, row, rows, start, padded, C)[None, :]
        fade = fade_of(rates_ptr, totals_ptr, row, chunks, n, K, C, CHANNELS)
        b_out = tile(out_ptr, start, length, stride_kt, C, K) if CHANNELS else b_k
        b_given = b_ds.to(dtype)
        tl.store(matrix(d_states_ptr, at * (V // BLOCK) + column // BLOCK, K, BLOCK, K), b_given)
        # du = readsᵀ do + leave ⊙ k dS',   dr = inverseᵀ du
        b_du = b_leave * tl.dot(b_given, tl.trans(b_out)) + tl.dot(b_do, b_reads)  # [BLOCK, C]
        b_dr = tl.dot(b_du.to(dtype), b_inverse)
        store_tile(dr_ptr, tl.trans(b_dr.to(dtype)), start, length, V, C, BLOCK)
        # dS = enter_last dS' + qᵀ (enter ⊙ do) − kᵀ (β enter ⊙ dr)
        b_ds = fade * b_ds + tl.dot((b_enter * b_do.to(tl.float32)).to(dtype), b_q)
        b_ds -= tl.dot((b_erase * b_dr).to(dtype), b_k)
    if STATE:
        tl.store(transposed(d_state_ptr + column, row, V, K, BLOCK), b_ds)


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, reads_ptr, rates_ptr, states_ptr, u_ptr, d_states_ptr, dr_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, length, chunks, rows, heads, group,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ob, stride_ot, stride_oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every gradient of one chunk of one value head with one decay, from the states on both its sides."""
    row, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head, start = tl.cast(row // heads, tl.int64), row % heads, n * C
    key, padded, base = head // group, chunks * C, batch * length * heads + head
    dtype = k_ptr.dtype.element_ty
    b_enter = rate(rates_ptr, ENTER, row, rows, start, padded, C)
    b_leave = rate(rates_ptr, LEAVE, row, rows, start, padded, C)
    b_beta = rate(rates_ptr, BETA, row, rows, start, padded, C)
    b_total = rate(rates_ptr, TOTAL, row, rows, start, padded, C)
    b_document = rate(rates_ptr, DOCUMENT, row, rows, start, padded, C)
    fade = fade_of(rates_ptr, rates_ptr, row, chunks, n, K, C, False)

    # dv = β dr,   dβ = Σ_v dr (v − enter ⊙ k S) + …
    q_ptr += batch * stride_qb + key * stride_qh
    k_ptr += batch * stride_kb + key * stride_kh
    b_dr = tile(dr_ptr + tl.cast(row, tl.int64) * length * V, start, length, V, C, V)
    b_v = tile(v_ptr + batch * stride_vb + head * stride_vh, start, length, stride_vt, C, V)
    store_tile(dv_ptr + base * V, b_beta[:, None] * b_dr.to(tl.float32), start, length, heads * V, C, V)
    b_dbeta = tl.sum(b_v.to(tl.float32) * b_dr.to(tl.float32), 1)

    # dN = −dr uᵀ and d reads = do uᵀ, each through its decays; dG gathers decay · d decay
    b_u = tile(u_ptr + tl.cast(row, tl.int64) * length * V, start, length, V, C, V)
    b_do = tile(do_ptr + batch * stride_ob + head * stride_oh, start, length, stride_ot, C, V)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_within = decay_between(b_total, b_document, C)
    b_dn = tl.where(i > j, -tl.dot(b_dr, tl.trans(b_u)), 0.0) * b_within  # [C, C]
    b_dreads = tl.dot(b_do, tl.trans(b_u))
    b_k = tile(k_ptr, start, length, stride_kt, C, K)
    b_both = b_dn * tl.dot(b_k, tl.trans(b_k))
    b_dbeta += tl.sum(b_both, 1)
    b_reads = tl.load(matrix(reads_ptr, tl.program_id(0), C, C, C))
    b_both = b_beta[:, None] * b_both + b_dreads * b_reads.to(tl.float32)
    b_dtotal = tl.sum(b_both, 1) - tl.sum(b_both, 0)
    b_dreads = (b_within * b_dreads).to(dtype)
    b_dn = b_beta[:, None] * b_dn
    b_dn = (b_dn + tl.trans(b_dn)).to(dtype)

    # by BLOCK columns of the keys
    d_last, b_left, b_erased = 0.0, tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    for first in tl.range(0, K, BLOCK, num_stages=STAGES):
        # dq = enter ⊙ do Sᵀ + d reads k
        b_before = tl.load(matrix(states_ptr + first, tl.program_id(0), K, V, BLOCK))  # Sᵀ [V, BLOCK]
        b_key = tile(k_ptr + first, start, length, stride_kt, C, BLOCK)
        b_query = tile(q_ptr + first, start, length, stride_qt, C, BLOCK)
        b_dq = b_enter[:, None] * tl.dot(b_do, b_before)  # [C, BLOCK]
        # dk = leave ⊙ u dS'ᵀ − β enter ⊙ dr Sᵀ + d readsᵀ q + (dN + dNᵀ) k
        b_after = tl.load(matrix(d_states_ptr + first, tl.program_id(0), K, V, BLOCK))
        b_dk = b_leave[:, None] * tl.dot(b_u, b_after)
        b_erase = b_enter[:, None] * tl.dot(b_dr, b_before)
        b_left += tl.sum(b_dk * b_key.to(tl.float32), 1)
        b_erased += tl.sum(b_erase * b_key.to(tl.float32), 1)
        b_dtotal += tl.sum(b_dq * b_query.to(tl.float32), 1)
        d_last += tl.sum(b_before.to(tl.float32) * b_after.to(tl.float32))
        b_dk -= b_beta[:, None] * b_erase
        b_dq += tl.dot(b_dreads, b_key)
        b_dk += tl.dot(tl.trans(b_dreads), b_query)
        b_dk += tl.dot(b_dn, b_key)
        store_tile(dq_ptr + base * K + first, b_dq, start, length, heads * K, C, BLOCK)
        store_tile(dk_ptr + base * K + first, b_dk, start, length, heads * K, C, BLOCK)

    t = start + tl.arange(0, C)
    at = base + t.to(tl.int64) * heads
    tl.store(dbeta_ptr + at, b_dbeta - b_erased, mask=t < length)
    # leave_j and enter_last end in G_last; dg_t = Σ_{i ≥ t} dG_i
    d_last = fade * d_last + tl.sum(b_left)
    b_dtotal += tl.where(tl.arange(0, C) == C - 1, d_last, 0.0) - b_left - b_beta * b_erased
    tl.store(dg_ptr + at, tl.cumsum(b_dtotal, 0, reverse=True), mask=t < length)


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def channel_pairs_kernel(
    v_ptr, do_ptr, rates_ptr, u_ptr, dr_ptr, overlap_ptr, dv_ptr, dbeta_ptr, pairs_ptr, diagonal_ptr,
    length, chunks, rows, heads, group, stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
    V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One chunk's D + Dᵀ and E + Eᵀ into `pairs` and E's diagonal, for `channel_gradient_kernel`.

    Also dv, and dβ but for the state's share.
    """
    row, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head, start = tl.cast(row // heads, tl.int64), row % heads, n * C
    padded, base = chunks * C, batch * length * heads + head
    b_beta = rate(rates_ptr, BETA, row, rows, start, padded, C)
    b_document = rate(rates_ptr, DOCUMENT, row, rows, start, padded, C)

    # dv = β dr,   dβ = Σ_v dr v + Σ_j dN_ij (k, k)_ij + …
    b_dr = tile(dr_ptr + tl.cast(row, tl.int64) * length * V, start, length, V, C, V)
    b_v = tile(v_ptr + batch * stride_vb + head * stride_vh, start, length, stride_vt, C, V)
    store_tile(dv_ptr + base * V, b_beta[:, None] * b_dr.to(tl.float32), start, length, heads * V, C, V)
    b_dbeta = tl.sum(b_v.to(tl.float32) * b_dr.to(tl.float32), 1)
    b_u = tile(u_ptr + tl.cast(row, tl.int64) * length * V, start, length, V, C, V)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    b_seen = (i >= j) & (b_document[:, None] == b_document[None, :])

    # D = −β dr uᵀ
    b_d = tl.where(b_seen & (i > j), -tl.dot(b_dr, tl.trans(b_u)), 0.0)  # [C, C]
    b_dbeta += tl.sum(b_d * tl.load(matrix(overlap_ptr, tl.program_id(0), C, C, C)).to(tl.float32), 1)
    b_d = b_beta[:, None] * b_d
    at_ptr = matrix(pairs_ptr, 2 * tl.program_id(0), C, C, C)
    tl.store(at_ptr, (b_d + tl.trans(b_d)).to(pairs_ptr.dtype.element_ty))

    # E = do uᵀ
    b_do = tile(do_ptr + batch * stride_ob + head * stride_oh, start, length, stride_ot, C, V)
    b_e = tl.where(b_seen, tl.dot(b_do, tl.trans(b_u)), 0.0)
    tl.store(at_ptr + C * C, (b_e + tl.trans(b_e)).to(pairs_ptr.dtype.element_ty))

    t = start + tl.arange(0, C)
    tl.store(diagonal_ptr + tl.cast(row, tl.int64) * padded + t, tl.sum(tl.where(i == j, b_e, 0.0), 1))
    tl.store(dbeta_ptr + base + t.to(tl.int64) * heads, b_dbeta, mask=t < length)


@triton.jit
def through_decays(
    b_dq, b_dk, b_dg, pairs_ptr, b_q, b_k, totals_ptr, b_g,
    K: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add to dq, dk and dG of BLOCK channels; the gradients D of (k, k) and E of (q, k) come as D + Dᵀ and E + Eᵀ.

        dq_i = Σ_j E_ij P_ij k_j,   rows_i = Σ_j D_ij P_ij k_j,   columns_j = Σ_i P_ij (D_ij k_i + E_ij q_i)
        dk = rows + columns,   dG = q ⊙ dq + k ⊙ (rows − columns),   P_ij = exp(G_i − G_j) for j < i

    At each level a token is a row or a column, so that one product with D + Dᵀ makes the rows of some and the columns
    of the others. dG is computed from the rounded factors of the products: each pair adds to i exactly as much as it
    subtracts from j.
    """
    at_ptr = matrix(pairs_ptr, 2 * tl.program_id(0), C, C, C)
    for level in tl.range(0, 6, num_stages=1):  # unrolled, all masked factors would be held at once
        is_row = (tl.arange(0, C) >> level & 1 == 1)[:, None]
        b_e = decay_to_middle(totals_ptr, b_g, level, K, C, BLOCK)
        b_x = (b_k.to(tl.float32) * b_e).to(b_k.dtype)
        b_z = tl.where(is_row, (b_q.to(tl.float32) * b_e).to(b_k.dtype), b_x)
        b_keys = tl.dot(tl.load(at_ptr, mask=across(level, C), other=0.0), b_x)  # [C, BLOCK]
        b_queries = tl.dot(tl.load(at_ptr + C * C, mask=across(level, C), other=0.0), b_z)
        b_dq += tl.where(is_row, b_e * b_queries, 0.0)
        b_dk += b_e * (b_keys + tl.where(is_row, 0.0, b_queries))
        b_moved = b_x.to(tl.float32) * b_keys + b_z.to(tl.float32) * b_queries
        b_dg += tl.where(is_row, b_moved, -b_moved)
    return b_dq, b_dk, b_dg


@triton.jit(do_not_specialize=["length", "chunks", "rows"])
def channel_gradient_kernel(
    q_ptr, k_ptr, do_ptr, rates_ptr, states_ptr, u_ptr, d_states_ptr, dr_ptr, pairs_ptr, diagonal_ptr, totals_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, length, chunks, rows, heads, group,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_ob, stride_ot, stride_oh,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`gradient_kernel` with a decay per channel, after `channel_pairs_kernel`: dq, dk, dg, and dβ added to."""
    row, n = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    batch, head, start = tl.cast(row // heads, tl.int64), row % heads, n * C
    key, padded, base = head // group, chunks * C, batch * length * heads + head
    b_enter = rate(rates_ptr, ENTER, row, rows, start, padded, C)[:, None]
    b_leave = rate(rates_ptr, LEAVE, row, rows, start, padded, C)[:, None]
    b_beta = rate(rates_ptr, BETA, row, rows, start, padded, C)[:, None]
    b_diagonal = tl.load(diagonal_ptr + tl.cast(row, tl.int64) * padded + start + tl.arange(0, C))[:, None]
    fade = fade_of(rates_ptr, rates_ptr, row, chunks, n, K, C, False)
    is_last = tl.arange(0, C)[:, None] == C - 1
    q_ptr += batch * stride_qb + key * stride_qh
    k_ptr += batch * stride_kb + key * stride_kh
    do_ptr += batch * stride_ob + head * stride_oh
    u_ptr += tl.cast(row, tl.int64) * length * V
    dr_ptr += tl.cast(row, tl.int64) * length * V
    totals_ptr += tl.cast(tl.program_id(0), tl.int64) * C * K
    b_erased = tl.zeros([C], tl.float32)
    for first in tl.range(0, K, BLOCK, num_stages=STAGES):
        b_key = tile(k_ptr + first, start, length, stride_kt, C, BLOCK)
        b_query = tile(q_ptr + first, start, length, stride_qt, C, BLOCK)
        b_g = tile(totals_ptr + first, 0, C, K, C, BLOCK)
        b_last = tl.load(totals_ptr + (C - 1) * K + first + tl.arange(0, BLOCK))[None, :]
        # dq = enter ⊙ do Sᵀ + …
        b_before = tl.load(matrix(states_ptr + first, tl.program_id(0), K, V, BLOCK))  # Sᵀ [V, BLOCK]
        b_decay = b_enter * tl.exp(b_g)
        b_dq = b_decay * tl.dot(tile(do_ptr, start, length, stride_ot, C, V), b_before)  # [C, BLOCK]
        # dk = leave ⊙ u dS'ᵀ − β enter ⊙ dr Sᵀ + …
        b_erase = b_decay * tl.dot(tile(dr_ptr, start, length, V, C, V), b_before)
        b_after = tl.load(matrix(d_states_ptr + first, tl.program_id(0), K, V, BLOCK))
        b_dk = b_leave * tl.exp(b_last - b_g) * tl.dot(tile(u_ptr, start, length, V, C, V), b_after)
        # dG of these channels; leave_j and enter_last end in G_last
        b_lefts, b_erases = b_dk * b_key.to(tl.float32), b_erase * b_key.to(tl.float32)
        b_erased += tl.sum(b_erases, 1)
        b_dg = b_dq * b_query.to(tl.float32) - b_lefts - b_beta * b_erases
        b_end = fade * tl.exp(b_last) * tl.sum(b_before.to(tl.float32) * b_after.to(tl.float32), 0)[None, :]
        b_dg += tl.where(is_last, b_end + tl.sum(b_lefts, 0)[None, :], 0.0)
        b_dk -= b_beta * b_erase
        b_dq, b_dk, b_dg = through_decays(
            b_dq + b_diagonal * b_key, b_dk + b_diagonal * b_query, b_dg, pairs_ptr, b_query, b_key,
            totals_ptr + first, b_g, K, C, BLOCK,
        )  # fmt: skip
        b_dg = tl.cumsum(b_dg, 0, reverse=True)  # dg_t = Σ_{i ≥ t} dG_i
        store_tile(dg_ptr + base * K + first, b_dg, start, length, heads * K, C, BLOCK)
        store_tile(dq_ptr + base * K + first, b_dq, start, length, heads * K, C, BLOCK)
        store_tile(dk_ptr + base * K + first, b_dk, start, length, heads * K, C, BLOCK)
    t = start + tl.arange(0, C)
    at_ptr = dbeta_ptr + base + t.to(tl.int64) * heads
    tl.store(at_ptr, tl.load(at_ptr, mask=t < length, other=0.0) - b_erased, mask=t < length)
