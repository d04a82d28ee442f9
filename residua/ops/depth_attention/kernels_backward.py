"""Triton kernels of the gradient of attention over depth; letters are those of `kernels.py`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor
from residua.ops.depth_attention.kernels import load_row, store_row


@triton.jit
def load_readers(
    table, at, low, high, C: tl.constexpr, start, count, inside, dtype: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """The rows of the next readers, all of them before anything is stored: no load can be moved up past a store."""
    lows, highs = (), ()
    for i in tl.static_range(UNROLL):
        slot = tl.minimum(start + i, count - 1)
        g_low, g_high = load_row(tensor(table, slot, dtype), at, low, high, C, inside & (start + i < count))
        lows = lows + (g_low,)
        highs = highs + (g_high,)
    return lows, highs


@triton.jit(do_not_specialize=["tokens"])
def stats_kernel(
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
def mix_backward_kernel(
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
            tl.store(dz + slot * pitch + at, slope.to(dz.dtype.element_ty), mask=real)
            weight += slope * score
            sum_low += a[:, None] * g_low[i]
            sum_high += a[:, None] * g_high[i]
    tl.store(pull + at, weight * r / C, mask=inside)
    store_row(value_grad, at, low, high, C, inside, sum_low, sum_high)


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def row_sums(rows, COUNT: tl.constexpr, TOGETHER: tl.constexpr):
    """The sums over the columns of COUNT tensors. Where warps share a row, of three in one exchange among them."""
    sums = ()
    for i in tl.static_range(0, COUNT, 3 if TOGETHER else 1):
        if TOGETHER and i + 3 <= COUNT:
            sums = sums + tl.reduce((rows[i], rows[i + 1], rows[i + 2]), 1, _add3)
        elif TOGETHER and i + 2 == COUNT:
            sums = sums + tl.reduce((rows[i], rows[i + 1]), 1, _add2)
        else:
            sums = sums + (tl.sum(rows[i], 1),)
    return sums


@triton.jit
def load_pieces(pointer, at, inside, C: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """The rows `at` [tokens] in pieces of equal length, as they are stored."""
    row = ()
    for p in tl.static_range(PIECES):
        columns = p * PIECE + tl.arange(0, PIECE)
        mask = inside[:, None] & (columns < C)[None, :]
        row = row + (tl.load(pointer + at[:, None] * C + columns[None, :], mask=mask, other=0.0),)
    return row


@triton.jit
def store_piece(pointer, at, inside, piece, p: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    columns = p * PIECE + tl.arange(0, PIECE)
    mask = inside[:, None] & (columns < C)[None, :]
    tl.store(pointer + at[:, None] * C + columns[None, :], piece.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def dot_pieces(a, b, PIECES: tl.constexpr):
    """a ⊙ b, its pieces added up: what is left to sum is one piece."""
    product = a[0].to(tl.float32) * b[0].to(tl.float32)
    for p in tl.static_range(1, PIECES):
        product += a[p].to(tl.float32) * b[p].to(tl.float32)
    return product


@triton.jit(do_not_specialize=["tokens", "first", "tiles"])
def few_readers_backward_kernel(
    table, v, onward, z, rstd, u, dv, du_parts, tokens, first, pitch, tiles,
    C: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, READERS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The whole gradient of a source with few readers: dv = onward + Σ_l (a_l dh_l + slope_l u_l) − pull v.

    And a part of each du_l. `table` holds the addresses of the dh_l, then those of the readers' stats.
    """
    dtype: tl.constexpr = v.dtype.element_ty
    queries, du, gradients, stats = (), (), (), ()
    for l in tl.static_range(READERS):  # noqa: E741
        gradients, stats = gradients + (tensor(table, l, dtype),), stats + (tensor(table, READERS + l, tl.float32),)
        for p in tl.static_range(PIECES):
            columns = p * PIECE + tl.arange(0, PIECE)
            query = tl.load(u + (first + l) * C + columns, mask=columns < C, other=0.0)[None, :]
            queries, du = queries + (query,), du + (tl.zeros([TOKENS, PIECE], tl.float32),)
    part = tl.program_id(0)
    for tile in tl.range(part * tiles, part * tiles + tiles, num_stages=STAGES):
        at = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        inside = at < tokens
        value = load_pieces(v, at, inside, C, PIECE, PIECES)
        r = tl.load(rstd + at, mask=inside, other=0.0)
        g, products = (), ()
        for l in tl.static_range(READERS):  # noqa: E741
            g = g + (load_pieces(gradients[l], at, inside, C, PIECE, PIECES),)
            products = products + (dot_pieces(g[l], value, PIECES),)
        if ADD:
            before = load_pieces(onward, at, inside, C, PIECE, PIECES)
        dots = row_sums(products, READERS, TOGETHER)
        a, slope, pull = (), (), tl.zeros([TOKENS], tl.float32)
        for l in tl.static_range(READERS):  # noqa: E741
            score = tl.load(z + l * pitch + at, mask=inside, other=0.0)
            delta = tl.load(stats[l] + pitch + at, mask=inside, other=0.0)
            a = a + (tl.exp(score - tl.load(stats[l] + at, mask=inside, other=0.0)),)
            slope = slope + (r * a[l] * (dots[l] - delta),)
            pull += slope[l] * score * r / C
        new_du = ()
        for p in tl.static_range(PIECES):
            wide = value[p].to(tl.float32)
            d = -pull[:, None] * wide
            for l in tl.static_range(READERS):  # noqa: E741
                d += a[l][:, None] * g[l][p].to(tl.float32) + slope[l][:, None] * queries[l * PIECES + p]
            if ADD:
                d += before[p].to(tl.float32)
            store_piece(dv, at, inside, d, p, C, PIECE)
        for l in tl.static_range(READERS):  # noqa: E741
            for p in tl.static_range(PIECES):
                new_du = new_du + (du[l * PIECES + p] + slope[l][:, None] * value[p].to(tl.float32),)
        du = new_du
    for l in tl.static_range(READERS):  # noqa: E741
        for p in tl.static_range(PIECES):
            columns = p * PIECE + tl.arange(0, PIECE)
            mine = du_parts + (part * READERS + l) * C
            tl.store(mine + columns, tl.sum(du[l * PIECES + p], 0), mask=columns < C)


@triton.jit(do_not_specialize=["size", "begin", "length", "parts"])
def add_parts_kernel(
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
def attend_backward_kernel(
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
