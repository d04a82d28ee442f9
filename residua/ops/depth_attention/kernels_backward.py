"""Triton kernels of the gradient of attention over depth; letters are those of `kernels.py`."""

# mypy: ignore-errors
import triton
import triton.language as tl

from residua.ops._runtime.kernels import add2, add3, tensor
from residua.ops.depth_attention.kernels import load_row, store_row


@triton.jit
def load_readers(
    table_ptr, t, low, high, C: tl.constexpr, start, count, live, dtype: tl.constexpr, UNROLL: tl.constexpr
):  # fmt: skip
    """The rows of the next UNROLL readers, loaded before anything is stored: no load is moved up past a store."""
    b_lows, b_highs = (), ()
    for i in tl.static_range(UNROLL):
        slot = tl.minimum(start + i, count - 1)
        b_low, b_high = load_row(tensor(table_ptr, slot, dtype), t, low, high, C, live & (start + i < count))
        b_lows = b_lows + (b_low,)
        b_highs = b_highs + (b_high,)
    return b_lows, b_highs


@triton.jit(do_not_specialize=["tokens"])
def stats_kernel(
    dh_ptr, h_ptr, lse_ptr, stats_ptr, tokens, stride_s,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The numbers that a read passes on to its sources: stats[0] = lse, stats[1] = δ = dh · h."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    b_dh_low, b_dh_high = load_row(dh_ptr, t, low, high, C, live)
    b_h_low, b_h_high = load_row(h_ptr, t, low, high, C, live)
    b_delta = tl.sum(b_dh_low * b_h_low, 1) + tl.sum(b_dh_high * b_h_high, 1)  # [TOKENS]
    tl.store(stats_ptr + t, tl.load(lse_ptr + t, mask=live, other=0.0), mask=live)
    tl.store(stats_ptr + stride_s + t, b_delta, mask=live)


@triton.jit(do_not_specialize=["tokens", "count"])
def mix_backward_kernel(
    table_ptr, v_ptr, onward_ptr, z_ptr, rstd_ptr, dv_ptr, dz_ptr, pull_ptr, tokens, count, stride_zl,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ADD: tl.constexpr, TOKENS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """One source and all its readers l: dv = onward + Σ_l a_l dh_l, and what the scores' gradient needs.

    slope_l = rstd dz_l = rstd a_l (dh_l · v − δ_l),   pull = rstd/C Σ_l slope_l z_l
    The slopes are stored as dz. The table holds the `count` addresses of the dh_l, then those of the readers' stats.
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    b_v_low, b_v_high = load_row(v_ptr, t, low, high, C, live)
    if ADD:
        b_dv_low, b_dv_high = load_row(onward_ptr, t, low, high, C, live)
    else:
        b_dv_low, b_dv_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    b_rstd = tl.load(rstd_ptr + t, mask=live, other=0.0)
    b_pull = tl.zeros([TOKENS], tl.float32)
    for start in range(0, count, UNROLL):
        b_dh_low, b_dh_high = load_readers(
            table_ptr, t, low, high, C, start, count, live, v_ptr.dtype.element_ty, UNROLL
        )
        for i in tl.static_range(UNROLL):
            exists = live & (start + i < count)
            slot = tl.minimum(start + i, count - 1)
            stats_ptr = tensor(table_ptr, count + slot, tl.float32)
            # a_l = exp(z_l − lse_l)
            b_lse = tl.load(stats_ptr + t, mask=exists, other=0.0)
            b_delta = tl.load(stats_ptr + stride_zl + t, mask=exists, other=0.0)
            b_z = tl.load(z_ptr + slot * stride_zl + t, mask=exists, other=0.0)
            b_a = tl.where(exists, tl.exp(b_z - b_lse), 0.0)
            # slope_l = rstd a_l (dh_l · v − δ_l)
            b_slope = b_rstd * b_a * (tl.sum(b_dh_low[i] * b_v_low, 1) + tl.sum(b_dh_high[i] * b_v_high, 1) - b_delta)
            tl.store(dz_ptr + slot * stride_zl + t, b_slope.to(dz_ptr.dtype.element_ty), mask=exists)
            b_pull += b_slope * b_z
            # dv += a_l dh_l
            b_dv_low += b_a[:, None] * b_dh_low[i]
            b_dv_high += b_a[:, None] * b_dh_high[i]
    # pull = rstd/C Σ_l slope_l z_l
    tl.store(pull_ptr + t, b_pull * b_rstd / C, mask=live)
    store_row(dv_ptr, t, low, high, C, live, b_dv_low, b_dv_high)


@triton.jit
def row_sums(b_rows, COUNT: tl.constexpr, TOGETHER: tl.constexpr):
    """The sums over the columns of COUNT blocks. Where warps share a row (TOGETHER), they exchange three at a time."""
    b_sums = ()
    for i in tl.static_range(0, COUNT, 3 if TOGETHER else 1):
        if TOGETHER and i + 3 <= COUNT:
            b_sums = b_sums + tl.reduce((b_rows[i], b_rows[i + 1], b_rows[i + 2]), 1, add3)
        elif TOGETHER and i + 2 == COUNT:
            b_sums = b_sums + tl.reduce((b_rows[i], b_rows[i + 1]), 1, add2)
        else:
            b_sums = b_sums + (tl.sum(b_rows[i], 1),)
    return b_sums


@triton.jit
def load_pieces(x_ptr, t, live, C: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):
    """The rows t of x as PIECES blocks [TOKENS, PIECE], in the dtype they are stored in."""
    b_row = ()
    for p in tl.static_range(PIECES):
        c = p * PIECE + tl.arange(0, PIECE)
        mask = live[:, None] & (c < C)[None, :]
        b_row = b_row + (tl.load(x_ptr + t[:, None] * C + c[None, :], mask=mask, other=0.0),)
    return b_row


@triton.jit
def store_piece(x_ptr, t, live, b_piece, p: tl.constexpr, C: tl.constexpr, PIECE: tl.constexpr):
    c = p * PIECE + tl.arange(0, PIECE)
    mask = live[:, None] & (c < C)[None, :]
    tl.store(x_ptr + t[:, None] * C + c[None, :], b_piece.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot_pieces(a, b, PIECES: tl.constexpr):
    """a ⊙ b with its pieces added up: one block [TOKENS, PIECE] is left to sum."""
    b_product = a[0].to(tl.float32) * b[0].to(tl.float32)
    for p in tl.static_range(1, PIECES):
        b_product += a[p].to(tl.float32) * b[p].to(tl.float32)
    return b_product


@triton.jit(do_not_specialize=["tokens", "first", "tiles"])
def few_readers_backward_kernel(
    table_ptr, v_ptr, onward_ptr, z_ptr, rstd_ptr, u_ptr, dv_ptr, du_ptr, tokens, first, stride_zl, tiles,
    C: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr, READERS: tl.constexpr, ADD: tl.constexpr,
    TOKENS: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The whole gradient of a source with few readers: dv = onward + Σ_l (a_l dh_l + slope_l u_l) − pull v.

    And a part of each du_l = Σ_tokens slope_l v. The table holds the addresses of the dh_l, then of the readers' stats.
    """
    dtype: tl.constexpr = v_ptr.dtype.element_ty
    b_u, b_du, dh_ptrs, stats_ptrs = (), (), (), ()
    for l in tl.static_range(READERS):  # noqa: E741
        dh_ptrs, stats_ptrs = (
            dh_ptrs + (tensor(table_ptr, l, dtype),),
            stats_ptrs + (tensor(table_ptr, READERS + l, tl.float32),),
        )
        for p in tl.static_range(PIECES):
            c = p * PIECE + tl.arange(0, PIECE)
            b_query = tl.load(u_ptr + (first + l) * C + c, mask=c < C, other=0.0)[None, :]
            b_u, b_du = b_u + (b_query,), b_du + (tl.zeros([TOKENS, PIECE], tl.float32),)
    part = tl.program_id(0)
    for tile in tl.range(part * tiles, part * tiles + tiles, num_stages=STAGES):
        t = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        live = t < tokens
        # v and the dh_l of this tile of tokens
        b_v = load_pieces(v_ptr, t, live, C, PIECE, PIECES)  # PIECES of [TOKENS, PIECE]
        b_rstd = tl.load(rstd_ptr + t, mask=live, other=0.0)  # [TOKENS]
        b_dh, b_products = (), ()
        for l in tl.static_range(READERS):  # noqa: E741
            b_dh = b_dh + (load_pieces(dh_ptrs[l], t, live, C, PIECE, PIECES),)
            b_products = b_products + (dot_pieces(b_dh[l], b_v, PIECES),)
        if ADD:
            b_onward = load_pieces(onward_ptr, t, live, C, PIECE, PIECES)
        # dh_l · v
        b_dots = row_sums(b_products, READERS, TOGETHER)
        b_a, b_slope, b_pull = (), (), tl.zeros([TOKENS], tl.float32)
        for l in tl.static_range(READERS):  # noqa: E741
            # a_l = exp(z_l − lse_l), slope_l = rstd a_l (dh_l · v − δ_l), pull = rstd/C Σ_l slope_l z_l
            b_z = tl.load(z_ptr + l * stride_zl + t, mask=live, other=0.0)
            b_delta = tl.load(stats_ptrs[l] + stride_zl + t, mask=live, other=0.0)
            b_a = b_a + (tl.exp(b_z - tl.load(stats_ptrs[l] + t, mask=live, other=0.0)),)
            b_slope = b_slope + (b_rstd * b_a[l] * (b_dots[l] - b_delta),)
            b_pull += b_slope[l] * b_z * b_rstd / C
        b_du_new = ()
        for p in tl.static_range(PIECES):
            # dv = onward + Σ_l (a_l dh_l + slope_l u_l) − pull v
            b_wide = b_v[p].to(tl.float32)
            b_dv = -b_pull[:, None] * b_wide  # [TOKENS, PIECE]
            for l in tl.static_range(READERS):  # noqa: E741
                b_dv += b_a[l][:, None] * b_dh[l][p].to(tl.float32) + b_slope[l][:, None] * b_u[l * PIECES + p]
            if ADD:
                b_dv += b_onward[p].to(tl.float32)
            store_piece(dv_ptr, t, live, b_dv, p, C, PIECE)
        for l in tl.static_range(READERS):  # noqa: E741
            for p in tl.static_range(PIECES):
                # du_l += slope_l v
                b_du_new = b_du_new + (b_du[l * PIECES + p] + b_slope[l][:, None] * b_v[p].to(tl.float32),)
        b_du = b_du_new
    for l in tl.static_range(READERS):  # noqa: E741
        for p in tl.static_range(PIECES):
            c = p * PIECE + tl.arange(0, PIECE)
            # this program's part of du_l: summed over its tokens
            mine_ptr = du_ptr + (part * READERS + l) * C
            tl.store(mine_ptr + c, tl.sum(b_du[l * PIECES + p], 0), mask=c < C)


@triton.jit(do_not_specialize=["size", "begin", "length", "parts"])
def add_parts_kernel(
    parts_ptr, before_ptr, du_ptr, size, begin, length, parts,
    ADD: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """du = du_before, plus the sum of the parts in its `length` elements from `begin` on, always in the same order."""
    block = tl.program_id(0) * BLOCK
    i = block + tl.arange(0, BLOCK)
    within = (i >= begin) & (i < begin + length)
    touched = (block + BLOCK > begin) & (block < begin + length)
    b_du = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.where(touched, parts, 0), PARTS):
        part = start + tl.arange(0, PARTS)
        here = part[:, None] * length + (i - begin)[None, :]
        b_du += tl.sum(tl.load(parts_ptr + here, mask=(part < parts)[:, None] & within[None, :], other=0.0), 0)
    if ADD:
        b_du += tl.load(before_ptr + i, mask=i < size, other=0.0)
    tl.store(du_ptr + i, b_du, mask=i < size)


@triton.jit(do_not_specialize=["tokens", "count", "tiles"])
def attend_backward_kernel(
    table_ptr, u_ptr, dh_ptr, h_ptr, lse_ptr, z_ptr, rstd_ptr, du_ptr, tokens, count, stride_zi, tiles,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The gradient of one read for each source, and this program's part of du. The table: v_i, then dv_i."""
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    b_u_low = tl.load(u_ptr + low, mask=low < C, other=0.0)[None, :]
    b_u_high = tl.load(u_ptr + high, mask=high < C, other=0.0)[None, :]
    b_du_low, b_du_high = tl.zeros([TOKENS, LOW], tl.float32), tl.zeros([TOKENS, HIGH], tl.float32)
    part = tl.program_id(0)
    for tile in range(part * tiles, part * tiles + tiles):
        t = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        live = t < tokens
        # δ = dh · h
        b_dh_low, b_dh_high = load_row(dh_ptr, t, low, high, C, live)
        b_h_low, b_h_high = load_row(h_ptr, t, low, high, C, live)
        b_delta = tl.sum(b_dh_low * b_h_low, 1) + tl.sum(b_dh_high * b_h_high, 1)  # [TOKENS]
        b_lse = tl.load(lse_ptr + t, mask=live, other=0.0)
        for i in range(0, count):
            b_v_low, b_v_high = load_row(tensor(table_ptr, i, h_ptr.dtype.element_ty), t, low, high, C, live)
            b_z = tl.load(z_ptr + i * stride_zi + t, mask=live, other=0.0)
            b_rstd = tl.load(rstd_ptr + i * stride_zi + t, mask=live, other=0.0)
            # a_i = exp(z_i − lse), slope_i = rstd_i a_i (dh · v_i − δ)
            b_a = tl.exp(b_z - b_lse)
            b_slope = b_rstd * b_a * (tl.sum(b_dh_low * b_v_low, 1) + tl.sum(b_dh_high * b_v_high, 1) - b_delta)
            b_slope = tl.where(live, b_slope, 0.0)
            b_pull = (b_slope * b_z * b_rstd / C)[:, None]
            # du += slope_i v_i
            b_du_low += b_slope[:, None] * b_v_low
            b_du_high += b_slope[:, None] * b_v_high
            # dv_i = a_i dh + slope_i u − (rstd_i/C slope_i z_i) v_i
            b_dv_low = b_a[:, None] * b_dh_low + b_slope[:, None] * b_u_low - b_pull * b_v_low
            b_dv_high = b_a[:, None] * b_dh_high + b_slope[:, None] * b_u_high - b_pull * b_v_high
            store_row(tensor(table_ptr, count + i, h_ptr.dtype.element_ty), t, low, high, C, live, b_dv_low, b_dv_high)
    tl.store(du_ptr + part * C + low, tl.sum(b_du_low, 0), mask=low < C)
    tl.store(du_ptr + part * C + high, tl.sum(b_du_high, 0), mask=high < C)
