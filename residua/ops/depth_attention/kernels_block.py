"""Triton kernels of the gradients of several sources at once, from the readers they share; see `kernels.py`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops.depth_attention.kernels import add_weighted, store_sums, tensors


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
