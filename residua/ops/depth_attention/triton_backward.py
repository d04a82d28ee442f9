"""Triton kernels of the gradient of attention over depth; manner and letters are those of `triton.py`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops._runtime.triton_table import tensor
from residua.ops.depth_attention.triton import add_weighted, load_row, store_row, store_sums, tensors


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


@triton.jit(do_not_specialize=["tokens", "count"])
def block_weights_kernel(
    table, weights, tokens, count, pitch,
    TOKENS: tl.constexpr, LANES: tl.constexpr, SOURCES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """weights [count, pitch, SOURCES]: a_il = exp(z_il − lse_l); `table` is that of `block_backward_kernel`.

    The weights of one token and reader lie side by side.
    """
    place = tl.arange(0, SIZE)
    token, source = tl.program_id(0).to(tl.int64) * TOKENS + place // SOURCES, place % SOURCES
    inside = (place < TOKENS * SOURCES) & (token < tokens)
    scores = tl.load(table + 2 * count + 2 * SOURCES + source).to(tl.pointer_type(tl.float32)) + token
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        real = inside[:, None] & (lanes < count)[None, :]
        stats = tl.load(table + count + lanes, mask=lanes < count, other=0).to(tl.pointer_type(tl.float32))
        far = (lanes.to(tl.int64) * pitch)[None, :]
        z = tl.load(scores[:, None] + far, mask=real, other=0.0)
        lse = tl.load(stats[None, :] + token[:, None], mask=real, other=0.0)
        tl.store(weights + far * SOURCES + (token * SOURCES + source)[:, None], tl.exp(z - lse), mask=real)


@triton.jit(do_not_specialize=["tokens", "count"])
def block_backward_kernel(
    table, like, weights, dots, tokens, count, pitch,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SOURCES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Σ_l a_il dh_l and dots_il = dh_l · v_i of some sources i, from the `count` readers l they share; dh_l read once.

    Both are matrix products, one for each token. `table` holds the addresses of the dh_l and of the readers' stats,
    then those of the sources' v, of their sums, and of their z and rstd. A program has some columns of the row, and its
    part of the dots: dots [C / COLUMNS, count, pitch, SOURCES].
    """
    dtype: tl.constexpr = like.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns, sources = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    inside, known = at < tokens, sources < SOURCES
    mask = inside[:, None] & (columns < C)[None, :]
    here = (at[:, None] * C + columns[None, :])[:, None, :]
    values = tensors(table, 2 * count + sources, known, dtype)[None, :, None] + here
    v = tl.trans(tl.load(values, mask=mask[:, None, :] & known[None, :, None], other=0.0), (0, 2, 1))
    parts = dots + tl.program_id(1).to(tl.int64) * count * pitch * SOURCES
    sums = tl.zeros([TOKENS, COLUMNS, PADDED], tl.float32)
    for start in range(0, count, ROWS):
        l = start + tl.arange(0, ROWS)  # noqa: E741
        real = l < count
        g = tl.load(
            tensors(table, l, real, dtype)[None, :, None] + here, mask=mask[:, None, :] & real[None, :, None], other=0.0
        )
        of_reader = ((l.to(tl.int64) * pitch)[None, :] + at[:, None]) * SOURCES
        place = of_reader[:, :, None] + sources[None, None, :]
        exists = (inside[:, None] & real[None, :])[:, :, None] & known[None, None, :]
        a = tl.load(weights + place, mask=exists, other=0.0)
        if NARROW:
            found = tl.dot(g, v)
        else:
            found = tl.dot(g.to(tl.float32), v.to(tl.float32), input_precision="tf32x3")
        tl.store(parts + place, found, mask=exists)
        sums = add_weighted(sums, g, a, NARROW)
    store_sums(table, 2 * count + SOURCES + sources, known, at, columns, mask, sums, C, dtype)


@triton.jit(do_not_specialize=["tokens", "count"])
def block_slopes_kernel(
    table, weights, dots, dz, pull, tokens, count, pitch,
    C: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, SOURCES: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """What the scores' gradient needs, from `block_backward_kernel`'s dots: slope_il = rstd_i a_il (dots_il − δ_l) as
    dz [SOURCES, count, pitch], zero beyond the tokens, and pull_i = rstd_i/C Σ_l slope_il z_il.

    A program has all the sources of its tokens: what lies side by side in `weights` and `dots` is read together, and
    Triton turns it for dz, which lies along the tokens.
    """
    token, sources = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    inside, known = token < tokens, sources < SOURCES
    each = (token < pitch)[:, None] & known[None, :]
    slot = 2 * count + 2 * SOURCES + sources
    r = tl.load(tensors(table, slot + SOURCES, known, tl.float32)[None, :] + token[:, None], mask=each, other=0.0)
    scores = tensors(table, slot, known, tl.float32)[None, None, :]
    weight = tl.zeros([TOKENS, PADDED], tl.float32)
    for start in range(0, count, LANES):
        l = start + tl.arange(0, LANES)  # noqa: E741
        real = l < count
        far = token[:, None] + (l.to(tl.int64) * pitch)[None, :]
        delta = tl.load(
            tensors(table, count + l, real, tl.float32)[None, :] + pitch + token[:, None],
            mask=(token < pitch)[:, None] & real[None, :],
            other=0.0,
        )
        exists = each[:, None, :] & real[None, :, None]
        place = far[:, :, None] * SOURCES + sources[None, None, :]
        dot = tl.zeros([TOKENS, LANES, PADDED], tl.float32) - delta[:, :, None]
        for part in tl.static_range(PARTS):
            of_part = dots + tl.cast(part * count, tl.int64) * pitch * SOURCES
            dot += tl.load(of_part + place, mask=exists, other=0.0)
        slope = r[:, None, :] * tl.load(weights + place, mask=exists, other=0.0) * dot
        slope = tl.where(inside[:, None, None], slope, 0.0)
        weight += tl.sum(slope * tl.load(scores + far[:, :, None], mask=exists, other=0.0), 1)
        mine = dz + (sources.to(tl.int64) * count * pitch)[None, None, :] + far[:, :, None]
        tl.store(mine, slope.to(dz.dtype.element_ty), mask=exists)
    tl.store(pull + (sources * pitch)[None, :] + token[:, None], weight * r / C, mask=each)


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


@triton.jit
def _entries(table, slot, COUNT: tl.constexpr):
    """The addresses in `table` from `slot` on."""
    found = ()
    for i in tl.static_range(COUNT):
        found = found + (tl.load(table + slot + i),)
    return found


@triton.jit
def _chosen(addresses, which, COUNT: tl.constexpr, dtype: tl.constexpr):
    """The tensor whose address is number `which`, without a load: in a loop, others would have to wait for it."""
    address = addresses[0]
    for i in tl.static_range(1, COUNT):
        address = tl.where(which == i, addresses[i], address)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _add_products(before, values, back, slopes, turned, queries, du, NARROW: tl.constexpr, CHUNKS: tl.constexpr):
    """before − back · v + Σ slopesᵀ u, and du + slopes v, chunk by chunk; `turned` are the slopesᵀ.

    Narrow, all that comes from memory is a factor of a product, if with the identity: that is what Triton loads ahead.
    """
    new_du = ()
    if NARROW:
        grad = -back[:, None] * values.to(tl.float32)
        one = tl.arange(0, before.shape[0])
        grad = tl.dot((one[:, None] == one[None, :]).to(before.dtype), before, grad)
        for chunk in tl.static_range(CHUNKS):
            grad = tl.dot(turned[chunk], queries[chunk], grad)
            new_du = new_du + (tl.dot(slopes[chunk], values, du[chunk]),)
    else:
        wide = values.to(tl.float32)
        grad = before.to(tl.float32) - back[:, None] * wide
        for chunk in tl.static_range(CHUNKS):
            grad = tl.dot(turned[chunk].to(tl.float32), queries[chunk], grad, input_precision="tf32x3")
            more = tl.dot(slopes[chunk].to(tl.float32), wide, du[chunk], input_precision="tf32x3")
            new_du = new_du + (more,)
    return grad, new_du


@triton.jit(do_not_specialize=["tokens", "first", "count", "tiles"])
def scores_backward_kernel(
    table, like, dz, pull, u, du_parts, tokens, first, count, pitch, tiles,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr,
    CHUNKS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """dv_i += Σ_l dz_il u_l − pull_i · v_i, and this program's part of du_l = Σ_i Σ_tokens dz_il v_i.

    `table` is that of `block_backward_kernel`, the sources' sums being dv. One loop goes over tokens and sources, so du
    stays in registers to the end. The readers are in CHUNKS of READERS, two products each. dz is zero beyond the
    tokens, so it can be loaded up to the pitch and sixteen numbers at once.
    """
    dtype: tl.constexpr = like.dtype.element_ty
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    readers, token = tl.arange(0, READERS), tl.arange(0, TOKENS).to(tl.int64)
    queries, du = (), ()
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        known = (l < count)[:, None] & (columns < C)[None, :]
        query = tl.load(u + (first + l)[:, None] * C + columns[None, :], mask=known, other=0.0)
        queries = queries + (query.to(tl.bfloat16) if NARROW else query,)
        du = du + (tl.zeros([READERS, COLUMNS], tl.float32),)
    values_at, grads_at = _entries(table, 2 * count, SOURCES), _entries(table, 2 * count + SOURCES, SOURCES)
    begin, end = part * tiles * SOURCES, (part * tiles + tiles) * SOURCES
    at = begin // SOURCES * TOKENS + token
    coming = tl.load(pull + at, mask=at < tokens, other=0.0)
    for step in range(begin, end):
        source, at = step % SOURCES, step // SOURCES * TOKENS + token
        inside = at < tokens
        here = at[:, None] * C + columns[None, :]
        mask = inside[:, None] & (columns < C)[None, :]
        dv = _chosen(grads_at, source, SOURCES, dtype) + here
        before = tl.load(dv, mask=mask, other=0.0)
        values = tl.load(_chosen(values_at, source, SOURCES, dtype) + here, mask=mask, other=0.0)
        slopes, turned = (), ()
        for chunk in tl.static_range(CHUNKS):
            l = chunk * READERS + readers  # noqa: E741
            far, real = (source * count + l).to(tl.int64) * pitch, l < count
            slope = tl.load(dz + far[:, None] + at[None, :], mask=real[:, None] & (at < pitch)[None, :], other=0.0)
            other = tl.load(dz + far[None, :] + at[:, None], mask=real[None, :] & (at < pitch)[:, None], other=0.0)
            slopes, turned = slopes + (slope,), turned + (other,)
        back, after = coming, step + 1
        then = after // SOURCES * TOKENS + token
        coming = tl.load(pull + after % SOURCES * pitch + then, mask=(then < tokens) & (after < end), other=0.0)
        grad, du = _add_products(before, values, back, slopes, turned, queries, du, NARROW, CHUNKS)
        tl.store(dv, grad.to(dtype), mask=mask)
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        known = (l < count)[:, None] & (columns < C)[None, :]
        tl.store(du_parts + (part * count + l)[:, None] * C + columns[None, :], du[chunk], mask=known)


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
