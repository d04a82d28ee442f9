"""Triton kernels of the gradients of several sources at once, from shared readers; `kernels.py` has their gain."""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops.depth_attention.kernels import add_weighted, store_sums, tensors


@triton.jit(do_not_specialize=["tokens", "count"])
def block_weights_kernel(
    table_ptr, a_ptr, tokens, count, stride_zl,
    TOKENS: tl.constexpr, LANES: tl.constexpr, SOURCES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """weights [count, pitch, SOURCES]: a_il = exp(z_il − lse_l); the table is that of `block_backward_kernel`.

    The weights of one token and reader are adjacent in memory.
    """
    # SIZE numbers: one for each token and source
    n = tl.arange(0, SIZE)
    t, source = tl.program_id(0).to(tl.int64) * TOKENS + n // SOURCES, n % SOURCES
    live = (n < TOKENS * SOURCES) & (t < tokens)
    z_ptr = tl.load(table_ptr + 2 * count + 2 * SOURCES + source).to(tl.pointer_type(tl.float32)) + t
    for start in range(0, count, LANES):
        lanes = start + tl.arange(0, LANES)
        exists = live[:, None] & (lanes < count)[None, :]
        stats_ptr = tl.load(table_ptr + count + lanes, mask=lanes < count, other=0).to(tl.pointer_type(tl.float32))
        far = (lanes.to(tl.int64) * stride_zl)[None, :]
        b_z = tl.load(z_ptr[:, None] + far, mask=exists, other=0.0)  # [SIZE, LANES]
        b_lse = tl.load(stats_ptr[None, :] + t[:, None], mask=exists, other=0.0)
        # a_il = exp(z_il − lse_l)
        tl.store(a_ptr + far * SOURCES + (t * SOURCES + source)[:, None], tl.exp(b_z - b_lse), mask=exists)


@triton.jit(do_not_specialize=["tokens", "count"])
def block_backward_kernel(
    table_ptr, like_ptr, a_ptr, dots_ptr, tokens, count, stride_al,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SOURCES: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Σ_l a_il dh_l and dots_il = dh_l · v_i of some sources i, from the `count` readers l they share; dh_l read once.

    Both are matrix products, one for each token. The table holds the addresses of the dh_l and of the readers' stats,
    then those of the sources' v, of their sums, and of their z and rstd. A program has COLUMNS columns of the row, and
    its part of the dots: dots [C / COLUMNS, count, pitch, SOURCES].
    """
    dtype: tl.constexpr = like_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c, i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    live, is_source = t < tokens, i < SOURCES
    mask = live[:, None] & (c < C)[None, :]
    here = (t[:, None] * C + c[None, :])[:, None, :]
    # v_i: [TOKENS, COLUMNS, PADDED]
    v_ptr = tensors(table_ptr, 2 * count + i, is_source, dtype)[None, :, None] + here
    b_v = tl.trans(tl.load(v_ptr, mask=mask[:, None, :] & is_source[None, :, None], other=0.0), (0, 2, 1))
    part_ptr = dots_ptr + tl.program_id(1).to(tl.int64) * count * stride_al * SOURCES
    b_sums = tl.zeros([TOKENS, COLUMNS, PADDED], tl.float32)
    for start in range(0, count, ROWS):
        l = start + tl.arange(0, ROWS)  # noqa: E741
        exists = l < count
        # dh_l of ROWS readers: [TOKENS, ROWS, COLUMNS]
        b_dh = tl.load(
            tensors(table_ptr, l, exists, dtype)[None, :, None] + here,
            mask=mask[:, None, :] & exists[None, :, None],
            other=0.0,
        )
        at = ((l.to(tl.int64) * stride_al)[None, :] + t[:, None]) * SOURCES
        a_at = at[:, :, None] + i[None, None, :]
        mask_a = (live[:, None] & exists[None, :])[:, :, None] & is_source[None, None, :]
        # a_il: [TOKENS, ROWS, PADDED]
        b_a = tl.load(a_ptr + a_at, mask=mask_a, other=0.0)
        # dots_il = dh_l · v_i over these columns
        if NARROW:
            b_dots = tl.dot(b_dh, b_v)
        else:
            b_dots = tl.dot(b_dh.to(tl.float32), b_v.to(tl.float32), input_precision="tf32x3")
        tl.store(part_ptr + a_at, b_dots, mask=mask_a)
        # Σ_l a_il dh_l
        b_sums = add_weighted(b_sums, b_dh, b_a, NARROW)
    store_sums(table_ptr, 2 * count + SOURCES + i, is_source, t, c, mask, b_sums, C, dtype)


@triton.jit(do_not_specialize=["tokens", "count"])
def block_slopes_kernel(
    table_ptr, a_ptr, dots_ptr, dz_ptr, pull_ptr, tokens, count, stride_zl,
    C: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, SOURCES: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Inputs of the scores' gradient, from the dots of `block_backward_kernel`: slope_il = rstd_i a_il (dots_il − δ_l)
    as dz [SOURCES, count, pitch], zero beyond the tokens, and pull_i = rstd_i/C Σ_l slope_il z_il.

    A program has all the sources of its tokens: it reads what is adjacent in a and dots, and Triton transposes it for
    dz, which is contiguous along the tokens.
    """
    t, i = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, PADDED)
    live, is_source = t < tokens, i < SOURCES
    each = (t < stride_zl)[:, None] & is_source[None, :]
    slot = 2 * count + 2 * SOURCES + i
    b_rstd = tl.load(
        tensors(table_ptr, slot + SOURCES, is_source, tl.float32)[None, :] + t[:, None], mask=each, other=0.0
    )
    z_ptr = tensors(table_ptr, slot, is_source, tl.float32)[None, None, :]
    b_pull = tl.zeros([TOKENS, PADDED], tl.float32)
    for start in range(0, count, LANES):
        l = start + tl.arange(0, LANES)  # noqa: E741
        is_reader = l < count
        far = t[:, None] + (l.to(tl.int64) * stride_zl)[None, :]
        b_delta = tl.load(
            tensors(table_ptr, count + l, is_reader, tl.float32)[None, :] + stride_zl + t[:, None],
            mask=(t < stride_zl)[:, None] & is_reader[None, :],
            other=0.0,
        )
        exists = each[:, None, :] & is_reader[None, :, None]
        at = far[:, :, None] * SOURCES + i[None, None, :]
        # dh_l · v_i − δ_l, from the parts of the dot product
        b_dot = tl.zeros([TOKENS, LANES, PADDED], tl.float32) - b_delta[:, :, None]
        for part in tl.static_range(PARTS):
            part_ptr = dots_ptr + tl.cast(part * count, tl.int64) * stride_zl * SOURCES
            b_dot += tl.load(part_ptr + at, mask=exists, other=0.0)
        # slope_il = rstd_i a_il (dh_l · v_i − δ_l)
        b_slope = b_rstd[:, None, :] * tl.load(a_ptr + at, mask=exists, other=0.0) * b_dot
        b_slope = tl.where(live[:, None, None], b_slope, 0.0)
        # Σ_l slope_il z_il
        b_pull += tl.sum(b_slope * tl.load(z_ptr + far[:, :, None], mask=exists, other=0.0), 1)
        mine_ptr = dz_ptr + (i.to(tl.int64) * count * stride_zl)[None, None, :] + far[:, :, None]
        tl.store(mine_ptr, b_slope.to(dz_ptr.dtype.element_ty), mask=exists)
    tl.store(pull_ptr + (i * stride_zl)[None, :] + t[:, None], b_pull * b_rstd / C, mask=each)


@triton.jit
def _entries(table_ptr, slot, COUNT: tl.constexpr):
    """COUNT addresses of the table, from `slot` on."""
    entries = ()
    for i in tl.static_range(COUNT):
        entries = entries + (tl.load(table_ptr + slot + i),)
    return entries


@triton.jit
def _chosen(addresses, which, COUNT: tl.constexpr, dtype: tl.constexpr):
    """The pointer number `which`, chosen without a load: in a loop, other loads would have to wait for it."""
    address = addresses[0]
    for i in tl.static_range(1, COUNT):
        address = tl.where(which == i, addresses[i], address)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _add_products(b_before, b_v, b_pull, b_slopes, b_slopes_t, b_u, b_du, NARROW: tl.constexpr, CHUNKS: tl.constexpr):
    """dv = before − pull · v + Σ slopesᵀ u, and du + slopes v, chunk by chunk.

    If NARROW, all that comes from memory is a factor of a product, `before` of one with the identity: Triton prefetches
    only such loads.
    """
    b_du_new = ()
    if NARROW:
        b_dv = -b_pull[:, None] * b_v.to(tl.float32)
        one = tl.arange(0, b_before.shape[0])
        b_dv = tl.dot((one[:, None] == one[None, :]).to(b_before.dtype), b_before, b_dv)
        for chunk in tl.static_range(CHUNKS):
            b_dv = tl.dot(b_slopes_t[chunk], b_u[chunk], b_dv)
            b_du_new = b_du_new + (tl.dot(b_slopes[chunk], b_v, b_du[chunk]),)
    else:
        b_wide = b_v.to(tl.float32)
        b_dv = b_before.to(tl.float32) - b_pull[:, None] * b_wide
        for chunk in tl.static_range(CHUNKS):
            b_dv = tl.dot(b_slopes_t[chunk].to(tl.float32), b_u[chunk], b_dv, input_precision="tf32x3")
            b_more = tl.dot(b_slopes[chunk].to(tl.float32), b_wide, b_du[chunk], input_precision="tf32x3")
            b_du_new = b_du_new + (b_more,)
    return b_dv, b_du_new


@triton.jit(do_not_specialize=["tokens", "first", "count", "tiles"])
def scores_backward_kernel(
    table_ptr, like_ptr, dz_ptr, pull_ptr, u_ptr, du_ptr, tokens, first, count, stride_zl, tiles,
    C: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, READERS: tl.constexpr,
    CHUNKS: tl.constexpr, SOURCES: tl.constexpr,
):  # fmt: skip
    """dv_i += Σ_l dz_il u_l − pull_i · v_i, and this program's part of du_l = Σ_i Σ_tokens dz_il v_i.

    The table is that of `block_backward_kernel`, the sources' sums being dv. One loop over tokens and sources keeps du
    in registers to the end. The readers are in CHUNKS of READERS, two products each. dz is zero after the last
    token, so it can be loaded up to the pitch, sixteen numbers at a time.
    """
    dtype: tl.constexpr = like_ptr.dtype.element_ty
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    readers, tile_t = tl.arange(0, READERS), tl.arange(0, TOKENS).to(tl.int64)
    b_u, b_du = (), ()
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        is_query = (l < count)[:, None] & (c < C)[None, :]
        # u_l of every reader: CHUNKS of [READERS, COLUMNS]
        b_query = tl.load(u_ptr + (first + l)[:, None] * C + c[None, :], mask=is_query, other=0.0)
        b_u = b_u + (b_query.to(tl.bfloat16) if NARROW else b_query,)
        b_du = b_du + (tl.zeros([READERS, COLUMNS], tl.float32),)
    v_ptrs, dv_ptrs = _entries(table_ptr, 2 * count, SOURCES), _entries(table_ptr, 2 * count + SOURCES, SOURCES)
    begin, end = part * tiles * SOURCES, (part * tiles + tiles) * SOURCES
    t = begin // SOURCES * TOKENS + tile_t
    b_pull_next = tl.load(pull_ptr + t, mask=t < tokens, other=0.0)  # [TOKENS]
    for step in range(begin, end):
        source, t = step % SOURCES, step // SOURCES * TOKENS + tile_t
        live = t < tokens
        here = t[:, None] * C + c[None, :]
        mask = live[:, None] & (c < C)[None, :]
        dv_ptr = _chosen(dv_ptrs, source, SOURCES, dtype) + here
        b_before = tl.load(dv_ptr, mask=mask, other=0.0)  # [TOKENS, COLUMNS]
        b_v = tl.load(_chosen(v_ptrs, source, SOURCES, dtype) + here, mask=mask, other=0.0)  # [TOKENS, COLUMNS]
        b_slopes, b_slopes_t = (), ()
        for chunk in tl.static_range(CHUNKS):
            l = chunk * READERS + readers  # noqa: E741
            far, is_reader = (source * count + l).to(tl.int64) * stride_zl, l < count
            # slope_l [READERS, TOKENS] and its transpose
            b_slope = tl.load(
                dz_ptr + far[:, None] + t[None, :], mask=is_reader[:, None] & (t < stride_zl)[None, :], other=0.0
            )
            b_slope_t = tl.load(
                dz_ptr + far[None, :] + t[:, None], mask=is_reader[None, :] & (t < stride_zl)[:, None], other=0.0
            )
            b_slopes, b_slopes_t = b_slopes + (b_slope,), b_slopes_t + (b_slope_t,)
        b_pull, after = b_pull_next, step + 1
        then = after // SOURCES * TOKENS + tile_t
        b_pull_next = tl.load(
            pull_ptr + after % SOURCES * stride_zl + then, mask=(then < tokens) & (after < end), other=0.0
        )
        # dv_i += Σ_l slope_il u_l − pull_i v_i, du_l += Σ_tokens slope_il v_i
        b_dv, b_du = _add_products(b_before, b_v, b_pull, b_slopes, b_slopes_t, b_u, b_du, NARROW, CHUNKS)
        tl.store(dv_ptr, b_dv.to(dtype), mask=mask)
    for chunk in tl.static_range(CHUNKS):
        l = chunk * READERS + readers  # noqa: E741
        is_query = (l < count)[:, None] & (c < C)[None, :]
        tl.store(du_ptr + (part * count + l)[:, None] * C + c[None, :], b_du[chunk], mask=is_query)
