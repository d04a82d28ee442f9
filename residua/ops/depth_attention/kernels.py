"""Triton kernels of attention over depth. Letters and equations are those of `reference.py` and `deferred.py`.

All of them are bound by memory, so each reads a C-wide row once. Sources and gradients come as a table of addresses,
never stacked, and how many they are is a run-time number: depth recompiles nothing. Rows are any width: kernels that
reduce over a row keep it in two power-of-two pieces (768 = 512 + 256), the others tile it.
Per-token scalars are fp32, [readers, tokens] with a row pitch that keeps every row 16-byte aligned.
The kernels of the gradient are in `kernels_backward.py` and `kernels_block.py`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


@triton.jit
def load_row(pointer, at, low, high, C: tl.constexpr, inside):
    """The rows `at` [tokens] as two fp32 pieces."""
    base = pointer + at[:, None] * C
    first = tl.load(base + low[None, :], mask=inside[:, None] & (low < C)[None, :], other=0.0)
    second = tl.load(base + high[None, :], mask=inside[:, None] & (high < C)[None, :], other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_row(pointer, at, low, high, C: tl.constexpr, inside, first, second):
    base = pointer + at[:, None] * C
    dtype = pointer.dtype.element_ty
    tl.store(base + low[None, :], first.to(dtype), mask=inside[:, None] & (low < C)[None, :])
    tl.store(base + high[None, :], second.to(dtype), mask=inside[:, None] & (high < C)[None, :])


@triton.jit
def _add_scores(sum, queries, known, v, C: tl.constexpr, NARROW: tl.constexpr):
    """sum [readers, tokens] + u vᵀ. Narrow v is exact in bf16, and so are the `queries` in two bf16 parts, C apart."""
    u = tl.load(queries, mask=known, other=0.0)
    if NARROW:
        sum = tl.dot(u, tl.trans(v), sum)
        sum = tl.dot(tl.load(queries + C, mask=known, other=0.0), tl.trans(v), sum)
    else:
        sum = tl.dot(u, tl.trans(v.to(tl.float32)), sum, input_precision="tf32x3")
    return sum


@triton.jit(do_not_specialize=["tokens", "first", "count"])
def scores_kernel(
    base, y, v_out, u, z, rstd, tokens, first, count, pitch, eps,
    C: tl.constexpr, ADD: tl.constexpr, NARROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """z_l = rstd · (u_l · v) for readers l in [first, first + count), rstd = (mean(v²) + eps)^-½; v = y or base + y.

    `u` is [reads, C] fp32 or, if NARROW, their parts [reads, 2, C] bf16. The readers are in CHUNKS of READERS, a
    product each. Squares are added up by eight, which one thread has: so few sums leave room for more warps.
    """
    PARTS: tl.constexpr = 2 if NARROW else 1
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    readers = tl.arange(0, READERS)
    inside = at < tokens
    dots = ()
    for _ in tl.static_range(CHUNKS):
        dots = dots + (tl.zeros([READERS, TOKENS], tl.float32),)
    squares = tl.zeros([TOKENS, COLUMNS // 8], tl.float32)
    for start in range(0, C, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        here = at[:, None] * C + columns[None, :]
        mask = inside[:, None] & (columns < C)[None, :]
        v = tl.load(y + here, mask=mask, other=0.0)
        if ADD:
            v = (v.to(tl.float32) + tl.load(base + here, mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
            tl.store(v_out + here, v, mask=mask)
        more = ()
        for chunk in tl.static_range(CHUNKS):
            l = chunk * READERS + readers  # noqa: E741
            queries = u + (first + l)[:, None] * (PARTS * C) + columns[None, :]
            known = (l < count)[:, None] & (columns < C)[None, :]
            more = more + (_add_scores(dots[chunk], queries, known, v, C, NARROW),)
        dots = more
        wide = v.to(tl.float32)
        squares += tl.sum(tl.reshape(wide * wide, [TOKENS, COLUMNS // 8, 8]), 2)
    r = tl.rsqrt(tl.sum(squares, 1) / C + eps)
    tl.store(rstd + at, r, mask=inside)
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        here = l[:, None] * pitch + at[None, :]
        tl.store(z + here, dots[chunk] * r[None, :], mask=(l < count)[:, None] & (at < pitch)[None, :])


@triton.jit
def _log_sum_exp(rows, count, at, top, total, LANES: tl.constexpr):
    """log(total · exp(top) + Σ_i exp(z_i)) of the tokens `at`; `rows` holds the addresses of the z_i."""
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        real = lanes < count
        scores = tl.load(rows + lanes, mask=real, other=0).to(tl.pointer_type(tl.float32))
        z = tl.load(scores[None, :] + at[:, None], mask=real[None, :], other=float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    return top + tl.log(total)


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_kernel(
    table, h, lse, tokens, count,
    C: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """h = Σ_i softmax(z)_i v_i and its lse; `table` holds the `count` addresses of the v_i, then those of the z_i."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < tokens
    at = tl.minimum(at, tokens - 1)
    here = at[:, None] * C + columns[None, :]
    mask = inside[:, None] & (columns < C)[None, :]
    none, nothing = tl.full([TOKENS], float("-inf"), tl.float32), tl.zeros([TOKENS], tl.float32)
    whole = _log_sum_exp(table + count, count, at, none, nothing, LANES)
    if tl.program_id(1) == 0:
        tl.store(lse + at, whole, mask=inside)

    sum = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            real = start + i < count
            slot = tl.minimum(start + i, count - 1)
            z = tl.load(tensor(table, count + slot, tl.float32) + at)
            a = tl.where(real, tl.exp(z - whole), 0.0)
            v = tl.load(tensor(table, slot, h.dtype.element_ty) + here, mask=mask & real, other=0.0)
            sum += a[:, None] * v.to(tl.float32)
    tl.store(h + here, sum.to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "count"])
def weights_kernel(
    table, weights, lse, tokens, count, pitch,
    TOKENS: tl.constexpr, LANES: tl.constexpr, READERS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """lse_l and weights [count, pitch, READERS], a_il = exp(z_il − lse_l), of readers whose z are rows in a row.

    `table` is that of `mix_group_kernel`, and ends with the `count` addresses of the first reader's rows. The weights
    of one token and source lie side by side.
    """
    rows = table + count + READERS
    place = tl.arange(0, SIZE)
    token, reader = tl.program_id(0).to(tl.int64) * TOKENS + place // READERS, place % READERS
    inside = (place < TOKENS * READERS) & (token < tokens)
    at = reader * pitch + tl.minimum(token, tokens - 1)
    none, nothing = tl.full([SIZE], float("-inf"), tl.float32), tl.zeros([SIZE], tl.float32)
    whole = _log_sum_exp(rows, count, at, none, nothing, LANES)
    tl.store(lse + at, whole, mask=inside)
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        real = inside[:, None] & (lanes < count)[None, :]
        scores = tl.load(rows + lanes, mask=lanes < count, other=0).to(tl.pointer_type(tl.float32))
        a = tl.exp(tl.load(scores[None, :] + at[:, None], mask=real, other=0.0) - whole[:, None])
        here = (lanes.to(tl.int64) * pitch)[None, :] * READERS + (token * READERS + reader)[:, None]
        tl.store(weights + here, a, mask=real)


@triton.jit
def tensors(table, slots, known, dtype: tl.constexpr):
    """The tensors whose addresses are in those `slots` that are `known`."""
    return tl.multiple_of(tl.load(table + slots, mask=known, other=0).to(tl.pointer_type(dtype)), 16)


@triton.jit
def add_weighted(sums, rows, a, NARROW: tl.constexpr):
    """sums [tokens, columns, n] + Σ_k rows_k a_kn, a matrix product for each token; rows [tokens, k, columns], a fp32.

    Narrow rows are exact in bf16, and so is `a` as the sum of two bf16 parts.
    """
    if NARROW:
        turned, coarse = tl.trans(rows, (0, 2, 1)), a.to(tl.bfloat16)
        sums = tl.dot(turned, coarse, sums)
        sums = tl.dot(turned, (a - coarse.to(tl.float32)).to(tl.bfloat16), sums)
    else:
        sums = tl.dot(tl.trans(rows.to(tl.float32), (0, 2, 1)), a, sums, input_precision="tf32x3")
    return sums


@triton.jit
def store_sums(table, slots, known, at, columns, mask, sums, C: tl.constexpr, dtype: tl.constexpr):
    """sums [tokens, columns, n] into the n tensors of `slots`; mask [tokens, columns]."""
    here = (at[:, None] * C + columns[None, :])[:, :, None]
    out = tensors(table, slots, known, dtype)[None, None, :] + here
    tl.store(out, sums.to(dtype), mask=mask[:, :, None] & known[None, None, :])


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_group_kernel(
    table, weights, like, tokens, count, pitch,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    READERS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """h_l = Σ_i a_il v_i for READERS readers in one pass over the sources, with the weights of `weights_kernel`.

    `table` holds the `count` addresses of the v_i, then those of the h_l, which are of the type of `like`.
    """
    dtype: tl.constexpr = like.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns, readers = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    inside, known = at < tokens, readers < READERS
    mask = inside[:, None] & (columns < C)[None, :]
    here = (at[:, None] * C + columns[None, :])[:, None, :]
    sums = tl.zeros([TOKENS, COLUMNS, PADDED], tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        real = i < count
        v = tl.load(
            tensors(table, i, real, dtype)[None, :, None] + here, mask=mask[:, None, :] & real[None, :, None], other=0.0
        )
        of_source = ((i.to(tl.int64) * pitch)[None, :] + at[:, None]) * READERS
        a = tl.load(
            weights + of_source[:, :, None] + readers[None, None, :],
            mask=(inside[:, None] & real[None, :])[:, :, None] & known[None, None, :],
            other=0.0,
        )
        sums = add_weighted(sums, v, a, NARROW)
    store_sums(table, count + readers, known, at, columns, mask, sums, C, dtype)


@triton.jit(do_not_specialize=["tokens", "count"])
def sum_read_kernel(
    table, base, y, u, v_out, z_out, rstd, h, lse, tokens, count, eps,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """v = base + y, its z and rstd for its one reader u, and that read: over v and the `count` others in `table`."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    at = tl.minimum(at, tokens - 1)
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    y_low, y_high = load_row(y, at, low, high, C, inside)
    b_low, b_high = load_row(base, at, low, high, C, inside)
    # The sum is what is stored, rounding and all.
    v_low = (y_low + b_low).to(y.dtype.element_ty).to(tl.float32)
    v_high = (y_high + b_high).to(y.dtype.element_ty).to(tl.float32)
    store_row(v_out, at, low, high, C, inside, v_low, v_high)
    u_low = tl.load(u + low, mask=low < C, other=0.0)[None, :]
    u_high = tl.load(u + high, mask=high < C, other=0.0)[None, :]
    r = tl.rsqrt((tl.sum(v_low * v_low, 1) + tl.sum(v_high * v_high, 1)) / C + eps)
    z = r * (tl.sum(v_low * u_low, 1) + tl.sum(v_high * u_high, 1))
    whole = _log_sum_exp(table + count, count, at, z, tl.full([TOKENS], 1.0, tl.float32), LANES)
    tl.store(rstd + at, r, mask=inside)
    tl.store(z_out + at, z, mask=inside)
    tl.store(lse + at, whole, mask=inside)

    a = tl.exp(z - whole)
    sum_low, sum_high = a[:, None] * v_low, a[:, None] * v_high
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            real = start + i < count
            slot = tl.minimum(start + i, count - 1)
            a = tl.exp(tl.load(tensor(table, count + slot, tl.float32) + at) - whole)
            o_low, o_high = load_row(tensor(table, slot, h.dtype.element_ty), at, low, high, C, inside & real)
            sum_low += a[:, None] * o_low
            sum_high += a[:, None] * o_high
    store_row(h, at, low, high, C, inside, sum_low, sum_high)


@triton.jit(do_not_specialize=["tokens", "count"])
def attend_kernel(
    table, u, h, lse, scores, rstd, tokens, count, pitch, eps,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One query over `count` sources in one pass, by online softmax: h, lse, and each source's z and rstd."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    u_low = tl.load(u + low, mask=low < C, other=0.0)[None, :]
    u_high = tl.load(u + high, mask=high < C, other=0.0)[None, :]
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    sum_low, sum_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            known = start + i < count
            slot = tl.minimum(start + i, count - 1)
            real = inside & known
            v_low, v_high = load_row(tensor(table, slot, h.dtype.element_ty), at, low, high, C, real)
            r = tl.rsqrt((tl.sum(v_low * v_low, 1) + tl.sum(v_high * v_high, 1)) / C + eps)
            z = r * (tl.sum(v_low * u_low, 1) + tl.sum(v_high * u_high, 1))
            tl.store(rstd + slot * pitch + at, r, mask=real)
            tl.store(scores + slot * pitch + at, z, mask=real)
            z = tl.where(known, z, float("-inf"))
            higher = tl.maximum(top, z)
            keep, a = tl.exp(top - higher), tl.exp(z - higher)
            total = total * keep + a
            sum_low = sum_low * keep[:, None] + a[:, None] * v_low
            sum_high = sum_high * keep[:, None] + a[:, None] * v_high
            top = higher
    tl.store(lse + at, top + tl.log(total), mask=inside)
    store_row(h, at, low, high, C, inside, sum_low / total[:, None], sum_high / total[:, None])
