"""Triton kernels of attention over depth. Letters and equations are those of `reference.py` and `deferred.py`.

All of them are bound by memory, so each reads a C-wide row once. Sources and gradients come as a table of addresses,
never stacked, and how many they are is a run-time number: depth recompiles nothing. Rows are any width: kernels that
reduce over a row keep it in two power-of-two pieces (768 = 512 + 256), the others tile it.
Per-token scalars are fp32, [readers, tokens] with a row pitch that keeps every row 16-byte aligned.
"""

import triton
import triton.language as tl


@triton.jit
def _load_row(pointer, at, low, high, C: tl.constexpr, inside):  # type: ignore[no-untyped-def]
    """The rows `at` [tokens] as two fp32 pieces."""
    base = pointer + at[:, None] * C
    first = tl.load(base + low[None, :], mask=inside[:, None] & (low < C)[None, :], other=0.0)
    second = tl.load(base + high[None, :], mask=inside[:, None] & (high < C)[None, :], other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_row(pointer, at, low, high, C: tl.constexpr, inside, first, second):  # type: ignore[no-untyped-def]
    base = pointer + at[:, None] * C
    dtype = pointer.dtype.element_ty
    tl.store(base + low[None, :], first.to(dtype), mask=inside[:, None] & (low < C)[None, :])
    tl.store(base + high[None, :], second.to(dtype), mask=inside[:, None] & (high < C)[None, :])


@triton.jit
def _product(a, b, sum, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """sum + a·b; `a` fp32. Narrow `b` is exact in bf16, and so is `a` as the sum of two bf16 parts."""
    if NARROW:
        coarse = a.to(tl.bfloat16)
        sum = tl.dot(coarse, b, sum)
        sum = tl.dot((a - coarse.to(tl.float32)).to(tl.bfloat16), b, sum)
    else:
        sum = tl.dot(a, b.to(tl.float32), sum, input_precision="tf32x3")
    return sum


@triton.jit(do_not_specialize=["tokens", "first", "count"])
def scores_kernel(  # type: ignore[no-untyped-def]
    base, y, v_out, u, z, rstd, tokens, first, count, pitch, eps,
    C: tl.constexpr, ADD: tl.constexpr, NARROW: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """z_l = rstd · (u_l · v) for readers l in [first, first + count), rstd = (mean(v²) + eps)^-½; v = y or base + y."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    readers = tl.arange(0, READERS)
    inside = at < tokens
    dots = tl.zeros([READERS, TOKENS], tl.float32)
    squares = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, C, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        here = at[:, None] * C + columns[None, :]
        mask = inside[:, None] & (columns < C)[None, :]
        v = tl.load(y + here, mask=mask, other=0.0)
        if ADD:
            v = (v.to(tl.float32) + tl.load(base + here, mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
            tl.store(v_out + here, v, mask=mask)
        queries = tl.load(
            u + (first + readers)[:, None] * C + columns[None, :],
            mask=(readers < count)[:, None] & (columns < C)[None, :],
            other=0.0,
        )
        dots = _product(queries, tl.trans(v), dots, NARROW)
        wide = v.to(tl.float32)
        squares += wide * wide
    r = tl.rsqrt(tl.sum(squares, 1) / C + eps)
    tl.store(rstd + at, r, mask=inside)
    tl.store(z + readers[:, None] * pitch + at[None, :], dots * r[None, :], mask=(readers < count)[:, None] & inside)


@triton.jit(do_not_specialize=["start", "count"])
def address_kernel(tensors, scalars, table, start, count, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of `tensors` to table[start:], of their `scalars` to table[count + start:].

    A kernel that walks over such a table need not be compiled for the number of tensors.
    """
    for i in tl.static_range(MOST):
        if start + i < count:
            tl.store(table + start + i, tensors[i].to(tl.int64))
            tl.store(table + count + start + i, scalars[i].to(tl.int64))


@triton.jit
def _tensor(table, slot, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.multiple_of(tl.load(table + slot).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_kernel(  # type: ignore[no-untyped-def]
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

    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        real = lanes < count
        rows = tl.load(table + count + lanes, mask=real, other=0).to(tl.pointer_type(tl.float32))
        z = tl.load(rows[None, :] + at[:, None], mask=real[None, :] & inside[:, None], other=float("-inf"))
        z = tl.where(inside[:, None], z, 0.0)
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        top = higher
    whole = top + tl.log(total)
    if tl.program_id(1) == 0:
        tl.store(lse + at, whole, mask=inside)

    sum = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            real = start + i < count
            slot = tl.minimum(start + i, count - 1)
            z = tl.load(_tensor(table, count + slot, tl.float32) + at)
            a = tl.where(real, tl.exp(z - whole), 0.0)
            v = tl.load(_tensor(table, slot, h.dtype.element_ty) + here, mask=mask & real, other=0.0)
            sum += a[:, None] * v.to(tl.float32)
    tl.store(h + here, sum.to(h.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def stats_kernel(  # type: ignore[no-untyped-def]
    dh, h, lse, stats, tokens, pitch,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What a read tells its sources: stats[0] = lse, stats[1] = δ = dh · h."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    g_low, g_high = _load_row(dh, at, low, high, C, inside)
    h_low, h_high = _load_row(h, at, low, high, C, inside)
    delta = tl.sum(g_low * h_low, 1) + tl.sum(g_high * h_high, 1)
    tl.store(stats + at, tl.load(lse + at, mask=inside, other=0.0), mask=inside)
    tl.store(stats + pitch + at, delta, mask=inside)


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_backward_kernel(  # type: ignore[no-untyped-def]
    table, v, onward, z, rstd, value_grad, dz, pull, tokens, count, pitch,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """One source and all its readers l: value_grad = onward + Σ_l a_l dh_l, and what the scores' gradient needs.

    slope_l = rstd dz_l = rstd a_l (dh_l · v − δ_l),   pull = rstd/C Σ_l slope_l z_l
    `table` holds the `count` addresses of the dh_l, then those of the readers' stats.
    """
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    v_low, v_high = _load_row(v, at, low, high, C, inside)
    if ADD:
        sum_low, sum_high = _load_row(onward, at, low, high, C, inside)
    else:
        sum_low, sum_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    r = tl.load(rstd + at, mask=inside, other=0.0)
    weight = tl.zeros([TOKENS], tl.float32)
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            real = inside & (start + i < count)
            slot = tl.minimum(start + i, count - 1)
            stats = _tensor(table, count + slot, tl.float32)
            lse = tl.load(stats + at, mask=real, other=0.0)
            delta = tl.load(stats + pitch + at, mask=real, other=0.0)
            score = tl.load(z + slot * pitch + at, mask=real, other=0.0)
            a = tl.where(real, tl.exp(score - lse), 0.0)
            g_low, g_high = _load_row(_tensor(table, slot, v.dtype.element_ty), at, low, high, C, real)
            slope = r * a * (tl.sum(g_low * v_low, 1) + tl.sum(g_high * v_high, 1) - delta)
            tl.store(dz + slot * pitch + at, slope, mask=real)
            weight += slope * score
            sum_low += a[:, None] * g_low
            sum_high += a[:, None] * g_high
    tl.store(pull + at, weight * r / C, mask=inside)
    _store_row(value_grad, at, low, high, C, inside, sum_low, sum_high)


@triton.jit(do_not_specialize=["tokens", "first", "count", "tiles"])
def scores_backward_kernel(  # type: ignore[no-untyped-def]
    value_grad, v, dz, pull, u, dv, du_parts, tokens, first, count, pitch, tiles,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """dv = value_grad + Σ_l dz_l u_l − pull · v, and this program's part of du_l = Σ_tokens dz_l v."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    readers = tl.arange(0, READERS)
    known = (readers < count)[:, None] & (columns < C)[None, :]
    queries = tl.load(u + (first + readers)[:, None] * C + columns[None, :], mask=known, other=0.0)
    du = tl.zeros([READERS, COLUMNS], tl.float32)
    for tile in range(part * tiles, part * tiles + tiles):
        at = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        inside = at < tokens
        here = at[:, None] * C + columns[None, :]
        mask = inside[:, None] & (columns < C)[None, :]
        slopes = tl.load(
            dz + readers[:, None] * pitch + at[None, :], mask=(readers < count)[:, None] & inside[None, :], other=0.0
        )
        values = tl.load(v + here, mask=mask, other=0.0)
        back = tl.load(pull + at, mask=inside, other=0.0)
        grad = tl.load(value_grad + here, mask=mask, other=0.0).to(tl.float32) - back[:, None] * values.to(tl.float32)
        if NARROW:
            grad = tl.dot(tl.trans(slopes.to(tl.bfloat16)), queries.to(tl.bfloat16), grad)
            du = tl.dot(slopes.to(tl.bfloat16), values, du)
        else:
            grad = tl.dot(tl.trans(slopes), queries, grad, input_precision="tf32x3")
            du = tl.dot(slopes, values.to(tl.float32), du, input_precision="tf32x3")
        tl.store(dv + here, grad.to(dv.dtype.element_ty), mask=mask)
    tl.store(du_parts + (part * count + readers)[:, None] * C + columns[None, :], du, mask=known)


@triton.jit(do_not_specialize=["size", "begin", "length", "parts"])
def add_parts_kernel(  # type: ignore[no-untyped-def]
    parts_of_du, du_before, du, size, begin, length, parts,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du = du_before, plus the sum of the parts in its `length` elements from `begin` on, always in the same order."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = (at >= begin) & (at < begin + length)
    sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        here = part[:, None] * length + (at - begin)[None, :]
        sum += tl.sum(tl.load(parts_of_du + here, mask=(part < parts)[:, None] & within[None, :], other=0.0), 0)
    if ADD:
        sum += tl.load(du_before + at, mask=at < size, other=0.0)
    tl.store(du + at, sum, mask=at < size)


@triton.jit(do_not_specialize=["tokens", "count"])
def attend_kernel(  # type: ignore[no-untyped-def]
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
            v_low, v_high = _load_row(_tensor(table, slot, h.dtype.element_ty), at, low, high, C, real)
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
    _store_row(h, at, low, high, C, inside, sum_low / total[:, None], sum_high / total[:, None])


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def attend_backward_kernel(  # type: ignore[no-untyped-def]
    table, u, dh, h, lse, scores, rstd, du_parts, tokens, count, pitch, tiles,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradient of one read to each source, and this program's part of du; `table` holds the v_i, then the dv_i."""
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    u_low = tl.load(u + low, mask=low < C, other=0.0)[None, :]
    u_high = tl.load(u + high, mask=high < C, other=0.0)[None, :]
    du_low, du_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    part = tl.program_id(0)
    for tile in range(part * tiles, part * tiles + tiles):
        at = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        inside = at < tokens
        g_low, g_high = _load_row(dh, at, low, high, C, inside)
        h_low, h_high = _load_row(h, at, low, high, C, inside)
        delta = tl.sum(g_low * h_low, 1) + tl.sum(g_high * h_high, 1)
        whole = tl.load(lse + at, mask=inside, other=0.0)
        for i in range(0, count):
            v_low, v_high = _load_row(_tensor(table, i, h.dtype.element_ty), at, low, high, C, inside)
            z = tl.load(scores + i * pitch + at, mask=inside, other=0.0)
            r = tl.load(rstd + i * pitch + at, mask=inside, other=0.0)
            a = tl.exp(z - whole)
            slope = r * a * (tl.sum(g_low * v_low, 1) + tl.sum(g_high * v_high, 1) - delta)
            slope = tl.where(inside, slope, 0.0)
            pull = (slope * z * r / C)[:, None]
            du_low += slope[:, None] * v_low
            du_high += slope[:, None] * v_high
            d_low = a[:, None] * g_low + slope[:, None] * u_low - pull * v_low
            d_high = a[:, None] * g_high + slope[:, None] * u_high - pull * v_high
            _store_row(_tensor(table, count + i, h.dtype.element_ty), at, low, high, C, inside, d_low, d_high)
    tl.store(du_parts + part * C + low, tl.sum(du_low, 0), mask=low < C)
    tl.store(du_parts + part * C + high, tl.sum(du_high, 0), mask=high < C)
