"""Triton kernels of attention over depth. Letters and equations are those of `reference.py` and `source_gradients.py`.

Memory limits all of them, so each reads a C-wide row once. Sources and gradients come as a table of addresses, never
stacked, and their number is a run-time value, so a deeper model recompiles nothing. Rows have any width: kernels that
reduce over a row hold it in two power-of-two pieces, low and high (768 = 512 + 256), the others tile it.
Per-token scalars are fp32, [readers, tokens] with a row pitch that keeps every row 16-byte aligned.
The kernels of the gradient are in `kernels_backward.py` and `kernels_block.py`.

Gains of the special ones: reads in groups and gradients of blocks of sources took Full at L from 1.371 to 1.182
times an additive step. Of such a step of S they are 6.9 and 9.0 ms, gradients of sources with few readers 5.7, and
with blocks the sums with their read 4.4; the gain of the last two alone is not measured (docs/lab/kernels.md,
`residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare prenorm,block_attnres,full_attnres`).
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


@triton.jit
def load_row(x_ptr, t, low, high, C: tl.constexpr, live):
    """The rows t [TOKENS] of x as two fp32 pieces."""
    base = x_ptr + t[:, None] * C
    b_low = tl.load(base + low[None, :], mask=live[:, None] & (low < C)[None, :], other=0.0)  # [TOKENS, LOW]
    b_high = tl.load(base + high[None, :], mask=live[:, None] & (high < C)[None, :], other=0.0)  # [TOKENS, HIGH]
    return b_low.to(tl.float32), b_high.to(tl.float32)


@triton.jit
def store_row(x_ptr, t, low, high, C: tl.constexpr, live, b_low, b_high):
    base = x_ptr + t[:, None] * C
    dtype = x_ptr.dtype.element_ty
    tl.store(base + low[None, :], b_low.to(dtype), mask=live[:, None] & (low < C)[None, :])
    tl.store(base + high[None, :], b_high.to(dtype), mask=live[:, None] & (high < C)[None, :])


@triton.jit
def _add_scores(b_z, u_ptr, live, b_v, C: tl.constexpr, NARROW: tl.constexpr):
    """z [READERS, TOKENS] + u vᵀ. Narrow v is exact in bf16, and so is u as two bf16 parts, C elements apart."""
    b_u = tl.load(u_ptr, mask=live, other=0.0)
    if NARROW:
        b_z = tl.dot(b_u, tl.trans(b_v), b_z)
        b_z = tl.dot(tl.load(u_ptr + C, mask=live, other=0.0), tl.trans(b_v), b_z)
    else:
        b_z = tl.dot(b_u, tl.trans(b_v.to(tl.float32)), b_z, input_precision="tf32x3")
    return b_z


@triton.jit(do_not_specialize=["tokens", "first", "count"])
def scores_kernel(
    base_ptr, y_ptr, v_ptr, u_ptr, z_ptr, rstd_ptr, tokens, first, count, stride_zl, eps,
    C: tl.constexpr, ADD: tl.constexpr, NARROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """z_l = rstd · (u_l · v) for readers l in [first, first + count), rstd = (mean(v²) + eps)^-½; v = y or base + y.

    u is [reads, C] fp32 or, if NARROW, two parts [reads, 2, C] bf16. The readers are in CHUNKS of READERS, one matrix
    product each. Squares are added in groups of eight, which one thread holds: few sums leave room for more warps.
    """
    PARTS: tl.constexpr = 2 if NARROW else 1
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    readers = tl.arange(0, READERS)
    live = t < tokens
    b_z = ()
    for _ in tl.static_range(CHUNKS):
        b_z = b_z + (tl.zeros([READERS, TOKENS], tl.float32),)
    b_squares = tl.zeros([TOKENS, COLUMNS // 8], tl.float32)  # [TOKENS, COLUMNS / 8]
    for start in range(0, C, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        here = t[:, None] * C + c[None, :]
        mask = live[:, None] & (c < C)[None, :]
        # v = y or base + y, rounded as it is stored
        b_v = tl.load(y_ptr + here, mask=mask, other=0.0)  # [TOKENS, COLUMNS]
        if ADD:
            b_v = (b_v.to(tl.float32) + tl.load(base_ptr + here, mask=mask, other=0.0).to(tl.float32)).to(b_v.dtype)
            tl.store(v_ptr + here, b_v, mask=mask)
        # z_l += u_l · v over these columns, for every reader l
        b_z_new = ()
        for chunk in tl.static_range(CHUNKS):
            l = chunk * READERS + readers  # noqa: E741
            query_ptr = u_ptr + (first + l)[:, None] * (PARTS * C) + c[None, :]
            is_query = (l < count)[:, None] & (c < C)[None, :]
            b_z_new = b_z_new + (_add_scores(b_z[chunk], query_ptr, is_query, b_v, C, NARROW),)
        b_z = b_z_new
        # Σ v²
        b_wide = b_v.to(tl.float32)
        b_squares += tl.sum(tl.reshape(b_wide * b_wide, [TOKENS, COLUMNS // 8, 8]), 2)
    # rstd = (mean(v²) + eps)^-½
    b_rstd = tl.rsqrt(tl.sum(b_squares, 1) / C + eps)  # [TOKENS]
    tl.store(rstd_ptr + t, b_rstd, mask=live)
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        # z_l ← rstd z_l
        here = l[:, None] * stride_zl + t[None, :]
        tl.store(z_ptr + here, b_z[chunk] * b_rstd[None, :], mask=(l < count)[:, None] & (t < stride_zl)[None, :])


@triton.jit
def log_sum_exp(rows_ptr, count, t, b_top, b_total, LANES: tl.constexpr):
    """log(total · exp(top) + Σ_i exp(z_i)) of the tokens t; rows holds the addresses of the z_i."""
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        live = lanes < count
        z_ptr = tl.load(rows_ptr + lanes, mask=live, other=0).to(tl.pointer_type(tl.float32))
        b_z = tl.load(z_ptr[None, :] + t[:, None], mask=live[None, :], other=float("-inf"))  # [TOKENS, LANES]
        # running maximum and Σ exp(z − maximum)
        b_higher = tl.maximum(b_top, tl.max(b_z, 1))
        b_total = b_total * tl.exp(b_top - b_higher) + tl.sum(tl.exp(b_z - b_higher[:, None]), 1)
        b_top = b_higher
    return b_top + tl.log(b_total)


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_kernel(
    table_ptr, h_ptr, lse_ptr, tokens, count,
    C: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """h = Σ_i softmax(z)_i v_i and its lse; the table holds the `count` addresses of the v_i, then those of the z_i."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = t < tokens
    t = tl.minimum(t, tokens - 1)
    here = t[:, None] * C + c[None, :]
    mask = live[:, None] & (c < C)[None, :]
    b_top, b_total = tl.full([TOKENS], float("-inf"), tl.float32), tl.zeros([TOKENS], tl.float32)
    # lse = log Σ_i exp(z_i)
    b_lse = log_sum_exp(table_ptr + count, count, t, b_top, b_total, LANES)  # [TOKENS]
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + t, b_lse, mask=live)

    # h = Σ_i exp(z_i − lse) v_i, UNROLL sources at a time
    b_h = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            exists = start + i < count
            slot = tl.minimum(start + i, count - 1)
            b_z = tl.load(tensor(table_ptr, count + slot, tl.float32) + t)
            b_a = tl.where(exists, tl.exp(b_z - b_lse), 0.0)  # [TOKENS]
            b_v = tl.load(
                tensor(table_ptr, slot, h_ptr.dtype.element_ty) + here, mask=mask & exists, other=0.0
            )  # [TOKENS, COLUMNS]
            b_h += b_a[:, None] * b_v.to(tl.float32)
    tl.store(h_ptr + here, b_h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def weights_kernel(
    table_ptr, a_ptr, lse_ptr, tokens, count, stride_zl,
    TOKENS: tl.constexpr, LANES: tl.constexpr, READERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """lse_l and weights [count, pitch, READERS], a_il = exp(z_il − lse_l), of readers whose z are consecutive rows.

    The table is that of `mix_group_kernel`, and ends with the `count` addresses of the first reader's rows. The weights
    of one token and source are adjacent in memory.
    """
    rows_ptr = table_ptr + count + READERS
    # SIZE numbers: one for each token and reader
    n = tl.arange(0, SIZE)
    t, reader = tl.program_id(0).to(tl.int64) * TOKENS + n // READERS, n % READERS
    live = (n < TOKENS * READERS) & (t < tokens)
    zt = reader * stride_zl + tl.minimum(t, tokens - 1)
    b_top, b_total = tl.full([SIZE], float("-inf"), tl.float32), tl.zeros([SIZE], tl.float32)
    # lse_l = log Σ_i exp(z_il)
    b_lse = log_sum_exp(rows_ptr, count, zt, b_top, b_total, LANES)  # [SIZE]
    tl.store(lse_ptr + zt, b_lse, mask=live)
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        exists = live[:, None] & (lanes < count)[None, :]
        z_ptr = tl.load(rows_ptr + lanes, mask=lanes < count, other=0).to(tl.pointer_type(tl.float32))
        # a_il = exp(z_il − lse_l)
        b_a = tl.exp(tl.load(z_ptr[None, :] + zt[:, None], mask=exists, other=0.0) - b_lse[:, None])  # [SIZE, LANES]
        here = (lanes.to(tl.int64) * stride_zl)[None, :] * READERS + (t * READERS + reader)[:, None]
        tl.store(a_ptr + here, b_a, mask=exists)


@triton.jit
def tensors(table_ptr, slots, live, dtype: tl.constexpr):
    """The pointers that the table holds in those `slots` that are live."""
    return tl.multiple_of(tl.load(table_ptr + slots, mask=live, other=0).to(tl.pointer_type(dtype)), 16)


@triton.jit
def add_weighted(b_sums, b_rows, b_a, NARROW: tl.constexpr):
    """sums [TOKENS, COLUMNS, n] + Σ_k rows_k a_kn, a matrix product per token; rows [TOKENS, k, COLUMNS], a fp32.

    Narrow rows are exact in bf16, and so is a as the sum of two bf16 parts.
    """
    if NARROW:
        b_turned, b_coarse = tl.trans(b_rows, (0, 2, 1)), b_a.to(tl.bfloat16)
        b_sums = tl.dot(b_turned, b_coarse, b_sums)
        b_sums = tl.dot(b_turned, (b_a - b_coarse.to(tl.float32)).to(tl.bfloat16), b_sums)
    else:
        b_sums = tl.dot(tl.trans(b_rows.to(tl.float32), (0, 2, 1)), b_a, b_sums, input_precision="tf32x3")
    return b_sums


@triton.jit
def store_sums(table_ptr, slots, live, t, c, mask, b_sums, C: tl.constexpr, dtype: tl.constexpr):
    """Store sums [TOKENS, COLUMNS, n] to the n tensors of `slots`; mask [TOKENS, COLUMNS]."""
    here = (t[:, None] * C + c[None, :])[:, :, None]
    out_ptr = tensors(table_ptr, slots, live, dtype)[None, None, :] + here
    tl.store(out_ptr, b_sums.to(dtype), mask=mask[:, :, None] & live[None, None, :])


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_group_kernel(
    table_ptr, a_ptr, like_ptr, tokens, count, stride_al,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    READERS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """h_l = Σ_i a_il v_i for READERS readers in one pass over the sources, with the weights of `weights_kernel`.

    The table holds the `count` addresses of the v_i, then those of the h_l, which have the dtype of `like`.
    """
    dtype: tl.constexpr = like_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c, reader = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    live, is_reader = t < tokens, reader < READERS
    mask = live[:, None] & (c < C)[None, :]
    here = (t[:, None] * C + c[None, :])[:, None, :]
    b_h = tl.zeros([TOKENS, COLUMNS, PADDED], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        exists = i < count
        # v_i of ROWS sources: [TOKENS, ROWS, COLUMNS]
        b_v = tl.load(
            tensors(table_ptr, i, exists, dtype)[None, :, None] + here,
            mask=mask[:, None, :] & exists[None, :, None],
            other=0.0,
        )
        at = ((i.to(tl.int64) * stride_al)[None, :] + t[:, None]) * READERS
        # a_il of these sources: [TOKENS, ROWS, PADDED]
        b_a = tl.load(
            a_ptr + at[:, :, None] + reader[None, None, :],
            mask=(live[:, None] & exists[None, :])[:, :, None] & is_reader[None, None, :],
            other=0.0,
        )
        # h_l += Σ_i a_il v_i
        b_h = add_weighted(b_h, b_v, b_a, NARROW)
    store_sums(table_ptr, count + reader, is_reader, t, c, mask, b_h, C, dtype)


@triton.jit(do_not_specialize=["tokens", "count"])
def sum_read_kernel(
    table_ptr, base_ptr, y_ptr, u_ptr, v_ptr, z_ptr, rstd_ptr, h_ptr, lse_ptr, tokens, count, eps,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """v = base + y, its z and rstd for its one reader u, and that read: over v and the `count` others in the table."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    t = tl.minimum(t, tokens - 1)
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    b_y_low, b_y_high = load_row(y_ptr, t, low, high, C, live)
    b_base_low, b_base_high = load_row(base_ptr, t, low, high, C, live)
    # v = base + y, rounded as it is stored
    b_v_low = (b_y_low + b_base_low).to(y_ptr.dtype.element_ty).to(tl.float32)
    b_v_high = (b_y_high + b_base_high).to(y_ptr.dtype.element_ty).to(tl.float32)
    store_row(v_ptr, t, low, high, C, live, b_v_low, b_v_high)
    b_u_low = tl.load(u_ptr + low, mask=low < C, other=0.0)[None, :]  # [1, LOW]
    b_u_high = tl.load(u_ptr + high, mask=high < C, other=0.0)[None, :]  # [1, HIGH]
    # rstd and z = rstd (u · v) of the new source
    b_rstd = tl.rsqrt((tl.sum(b_v_low * b_v_low, 1) + tl.sum(b_v_high * b_v_high, 1)) / C + eps)  # [TOKENS]
    b_z = b_rstd * (tl.sum(b_v_low * b_u_low, 1) + tl.sum(b_v_high * b_u_high, 1))
    # lse over v and the other sources
    b_lse = log_sum_exp(table_ptr + count, count, t, b_z, tl.full([TOKENS], 1.0, tl.float32), LANES)
    tl.store(rstd_ptr + t, b_rstd, mask=live)
    tl.store(z_ptr + t, b_z, mask=live)
    tl.store(lse_ptr + t, b_lse, mask=live)

    # h = Σ_i exp(z_i − lse) v_i, beginning with v
    b_a = tl.exp(b_z - b_lse)
    b_h_low, b_h_high = b_a[:, None] * b_v_low, b_a[:, None] * b_v_high
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            exists = start + i < count
            slot = tl.minimum(start + i, count - 1)
            b_a = tl.exp(tl.load(tensor(table_ptr, count + slot, tl.float32) + t) - b_lse)
            b_o_low, b_o_high = load_row(
                tensor(table_ptr, slot, h_ptr.dtype.element_ty), t, low, high, C, live & exists
            )
            b_h_low += b_a[:, None] * b_o_low
            b_h_high += b_a[:, None] * b_o_high
    store_row(h_ptr, t, low, high, C, live, b_h_low, b_h_high)


@triton.jit(do_not_specialize=["tokens", "count"])
def attend_kernel(
    table_ptr, u_ptr, h_ptr, lse_ptr, z_ptr, rstd_ptr, tokens, count, stride_zi, eps,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One query over `count` sources in one pass, by online softmax: h, lse, and each source's z and rstd.

    For `ops.depth_attention` alone; a whole model defers (`source_gradients.py`). `scores_kernel` and `mix_kernel`
    would read every source twice, in one launch more for each. With 12 sources it takes 0.197 ms, 0.575 with its
    gradient, where flash-linear-attention takes 0.253 and 0.800 (`residua bench ops depth_attention --implementations
    fused`).
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    b_u_low = tl.load(u_ptr + low, mask=low < C, other=0.0)[None, :]
    b_u_high = tl.load(u_ptr + high, mask=high < C, other=0.0)[None, :]
    b_top = tl.full([TOKENS], float("-inf"), tl.float32)
    b_total = tl.zeros([TOKENS], tl.float32)
    b_h_low, b_h_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            exists = start + i < count
            slot = tl.minimum(start + i, count - 1)
            mask = live & exists
            b_v_low, b_v_high = load_row(tensor(table_ptr, slot, h_ptr.dtype.element_ty), t, low, high, C, mask)
            # rstd_i and z_i = rstd_i (u · v_i)
            b_rstd = tl.rsqrt((tl.sum(b_v_low * b_v_low, 1) + tl.sum(b_v_high * b_v_high, 1)) / C + eps)
            b_z = b_rstd * (tl.sum(b_v_low * b_u_low, 1) + tl.sum(b_v_high * b_u_high, 1))
            tl.store(rstd_ptr + slot * stride_zi + t, b_rstd, mask=mask)
            tl.store(z_ptr + slot * stride_zi + t, b_z, mask=mask)
            # online softmax: rescale what is summed so far to the new maximum, add exp(z_i) v_i
            b_z = tl.where(exists, b_z, float("-inf"))
            b_higher = tl.maximum(b_top, b_z)
            b_keep, b_a = tl.exp(b_top - b_higher), tl.exp(b_z - b_higher)
            b_total = b_total * b_keep + b_a
            b_h_low = b_h_low * b_keep[:, None] + b_a[:, None] * b_v_low
            b_h_high = b_h_high * b_keep[:, None] + b_a[:, None] * b_v_high
            b_top = b_higher
    # lse, and h = Σ_i exp(z_i) v_i / Σ_i exp(z_i)
    tl.store(lse_ptr + t, b_top + tl.log(b_total), mask=live)
    store_row(h_ptr, t, low, high, C, live, b_h_low / b_total[:, None], b_h_high / b_total[:, None])
