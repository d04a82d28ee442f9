"""Triton kernels of the gradient of attention over depth; manner and letters are those of `triton.py`."""

import triton
import triton.language as tl

from residua.ops.depth_attention.triton import load_row, store_row
from residua.ops.triton_table import tensor


@triton.jit
def load_readers(  # type: ignore[no-untyped-def]
    table, at, low, high, C: tl.constexpr, start, count, inside, dtype: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """The rows of the next readers, all of them before anything is stored: no load can be moved up past a store."""
    lows, highs = (), ()
    for i in tl.static_range(UNROLL):
        slot = tl.minimum(start + i, count - 1)
        g_low, g_high = load_row(tensor(table, slot, dtype), at, low, high, C, inside & (start + i < count))
        lows = lows + (g_low,)  # type: ignore[assignment]
        highs = highs + (g_high,)  # type: ignore[assignment]
    return lows, highs


@triton.jit(do_not_specialize=["tokens"])
def stats_kernel(  # type: ignore[no-untyped-def]
    dh, h, lse, stats, tokens, pitch,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What a read tells its sources: stats[0] = lse, stats[1] = δ = dh · h."""
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    g_low, g_high = load_row(dh, at, low, high, C, inside)
    h_low, h_high = load_row(h, at, low, high, C, inside)
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
    v_low, v_high = load_row(v, at, low, high, C, inside)
    if ADD:
        sum_low, sum_high = load_row(onward, at, low, high, C, inside)
    else:
        sum_low, sum_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    r = tl.load(rstd + at, mask=inside, other=0.0)
    weight = tl.zeros([TOKENS], tl.float32)
    for start in range(0, count, UNROLL):
        g_low, g_high = load_readers(table, at, low, high, C, start, count, inside, v.dtype.element_ty, UNROLL)
        for i in tl.static_range(UNROLL):
            real = inside & (start + i < count)
            slot = tl.minimum(start + i, count - 1)
            stats = tensor(table, count + slot, tl.float32)
            lse = tl.load(stats + at, mask=real, other=0.0)
            delta = tl.load(stats + pitch + at, mask=real, other=0.0)
            score = tl.load(z + slot * pitch + at, mask=real, other=0.0)
            a = tl.where(real, tl.exp(score - lse), 0.0)
            slope = r * a * (tl.sum(g_low[i] * v_low, 1) + tl.sum(g_high[i] * v_high, 1) - delta)
            tl.store(dz + slot * pitch + at, slope, mask=real)
            weight += slope * score
            sum_low += a[:, None] * g_low[i]
            sum_high += a[:, None] * g_high[i]
    tl.store(pull + at, weight * r / C, mask=inside)
    store_row(value_grad, at, low, high, C, inside, sum_low, sum_high)


@triton.jit(do_not_specialize=["tokens", "count", "skip"])
def mix_pair_backward_kernel(  # type: ignore[no-untyped-def]
    table, v, z, rstd, other_v, other_z, other_rstd, value_grad, other_value_grad, dz, pull, tokens, count, skip, pitch,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """`mix_backward_kernel` for two sources with the same `count` readers, whose dh_l are read once.

    Theirs are the rows of z from the first and of other_z from `skip` on; dz [2, count, pitch] and pull [2, pitch].
    """
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    v_low, v_high = load_row(v, at, low, high, C, inside)
    o_low, o_high = load_row(other_v, at, low, high, C, inside)
    v_sum_low, v_sum_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    o_sum_low, o_sum_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    v_r = tl.load(rstd + at, mask=inside, other=0.0)
    o_r = tl.load(other_rstd + at, mask=inside, other=0.0)
    v_weight, o_weight = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for start in range(0, count, UNROLL):
        g_low, g_high = load_readers(table, at, low, high, C, start, count, inside, v.dtype.element_ty, UNROLL)
        for i in tl.static_range(UNROLL):
            real = inside & (start + i < count)
            slot = tl.minimum(start + i, count - 1)
            stats = tensor(table, count + slot, tl.float32)
            lse = tl.load(stats + at, mask=real, other=0.0)
            delta = tl.load(stats + pitch + at, mask=real, other=0.0)
            v_score = tl.load(z + slot * pitch + at, mask=real, other=0.0)
            o_score = tl.load(other_z + (skip + slot) * pitch + at, mask=real, other=0.0)
            v_a = tl.where(real, tl.exp(v_score - lse), 0.0)
            o_a = tl.where(real, tl.exp(o_score - lse), 0.0)
            v_slope = v_r * v_a * (tl.sum(g_low[i] * v_low, 1) + tl.sum(g_high[i] * v_high, 1) - delta)
            o_slope = o_r * o_a * (tl.sum(g_low[i] * o_low, 1) + tl.sum(g_high[i] * o_high, 1) - delta)
            tl.store(dz + slot * pitch + at, v_slope, mask=real)
            tl.store(dz + (count + slot) * pitch + at, o_slope, mask=real)
            v_weight += v_slope * v_score
            o_weight += o_slope * o_score
            v_sum_low += v_a[:, None] * g_low[i]
            v_sum_high += v_a[:, None] * g_high[i]
            o_sum_low += o_a[:, None] * g_low[i]
            o_sum_high += o_a[:, None] * g_high[i]
    tl.store(pull + at, v_weight * v_r / C, mask=inside)
    tl.store(pull + pitch + at, o_weight * o_r / C, mask=inside)
    store_row(value_grad, at, low, high, C, inside, v_sum_low, v_sum_high)
    store_row(other_value_grad, at, low, high, C, inside, o_sum_low, o_sum_high)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def one_reader_backward_kernel(  # type: ignore[no-untyped-def]
    dh, stats, v, onward, z, rstd, u, dv, du_parts, tokens, pitch, tiles,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The whole gradient of a source with one reader: dv = onward + a dh + slope u − pull v, and a part of du."""
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    u_low = tl.load(u + low, mask=low < C, other=0.0)[None, :]
    u_high = tl.load(u + high, mask=high < C, other=0.0)[None, :]
    du_low, du_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    part = tl.program_id(0)
    for tile in range(part * tiles, part * tiles + tiles):
        at = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        inside = at < tokens
        g_low, g_high = load_row(dh, at, low, high, C, inside)
        v_low, v_high = load_row(v, at, low, high, C, inside)
        score = tl.load(z + at, mask=inside, other=0.0)
        r = tl.load(rstd + at, mask=inside, other=0.0)
        delta = tl.load(stats + pitch + at, mask=inside, other=0.0)
        a = tl.exp(score - tl.load(stats + at, mask=inside, other=0.0))
        slope = r * a * (tl.sum(g_low * v_low, 1) + tl.sum(g_high * v_high, 1) - delta)
        pull = (slope * score * r / C)[:, None]
        du_low += slope[:, None] * v_low
        du_high += slope[:, None] * v_high
        d_low = a[:, None] * g_low + slope[:, None] * u_low - pull * v_low
        d_high = a[:, None] * g_high + slope[:, None] * u_high - pull * v_high
        if ADD:
            o_low, o_high = load_row(onward, at, low, high, C, inside)
            d_low += o_low
            d_high += o_high
        store_row(dv, at, low, high, C, inside, d_low, d_high)
    tl.store(du_parts + part * C + low, tl.sum(du_low, 0), mask=low < C)
    tl.store(du_parts + part * C + high, tl.sum(du_high, 0), mask=high < C)


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
    block = tl.program_id(0) * BLOCK
    at = block + tl.arange(0, BLOCK)
    within = (at >= begin) & (at < begin + length)
    touched = (block + BLOCK > begin) & (block < begin + length)
    sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.where(touched, parts, 0), PARTS):
        part = start + tl.arange(0, PARTS)
        here = part[:, None] * length + (at - begin)[None, :]
        sum += tl.sum(tl.load(parts_of_du + here, mask=(part < parts)[:, None] & within[None, :], other=0.0), 0)
    if ADD:
        sum += tl.load(du_before + at, mask=at < size, other=0.0)
    tl.store(du + at, sum, mask=at < size)


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
        g_low, g_high = load_row(dh, at, low, high, C, inside)
        h_low, h_high = load_row(h, at, low, high, C, inside)
        delta = tl.sum(g_low * h_low, 1) + tl.sum(g_high * h_high, 1)
        whole = tl.load(lse + at, mask=inside, other=0.0)
        for i in range(0, count):
            v_low, v_high = load_row(tensor(table, i, h.dtype.element_ty), at, low, high, C, inside)
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
            store_row(tensor(table, count + i, h.dtype.element_ty), at, low, high, C, inside, d_low, d_high)
    tl.store(du_parts + part * C + low, tl.sum(du_low, 0), mask=low < C)
    tl.store(du_parts + part * C + high, tl.sum(du_high, 0), mask=high < C)
