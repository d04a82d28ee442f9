"""Hyper-connections of at most 4 streams: two passes each way, each shaped for what it does.

φ is read once for every tile of tokens, so the tiles that it is multiplied with are long; what needs a whole row of
channels before it can go on is done in short tiles, which hold the row.

    forward:   write   X' = mix X + post y, ‖X'‖² and X' φᵀ, of a share of the channels
               read    z and pre from the shares' sums, h = Σ pre_i X'_i
    backward:  sums    dh · X_j and dh · y, and from them dz
               spread  G_i, and from it all the gradients

Without a projection nothing waits for a whole row: `write` computes h as well, `spread` the gradient of pre.
NORMED: with a projection, x = gain ⊙ RMS(h) takes the place of h, and its gradient that of dh (`kernels_normed.py`).
`kernels.py` has the equations, and NORM, Z, K and RANK. A second pass goes through the tokens backwards, for the
cache holds the last rows of the first one.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime import fused
from residua.ops.hyper_connection.kernels import _belongs, _phi, _replaced, _tanh, _tile, _weight
from residua.ops.hyper_connection.kernels_normed import gains, hidden_gradient, read_factors, store_normed, through_norm

INTERPRETED = tl.constexpr(fused.INTERPRETED)


@triton.jit
def _numbers(x_ptr, t, live, COUNT: tl.constexpr):
    """COUNT tensors [TOKENS]: a token's numbers, which each thread holds for its rows."""
    b_numbers = ()
    for i in tl.static_range(COUNT):
        b_numbers = b_numbers + (tl.load(x_ptr + i, mask=live, other=0.0).to(tl.float32),)
    return b_numbers


@triton.jit
def _rows(x_ptr, t, c, mask, C: tl.constexpr, N: tl.constexpr):
    """The tiles [TOKENS, BLOCK] of all N streams, as they are stored."""
    b_tiles = ()
    for j in tl.static_range(N):
        b_tiles = b_tiles + (tl.load(x_ptr + t[:, None] * (N * C) + j * C + c[None, :], mask=mask, other=0.0),)
    return b_tiles


@triton.jit
def _written(b_x, b_y, b_mix, b_post, i: tl.constexpr, N: tl.constexpr, dtype: tl.constexpr):
    """X'_i = Σ_j mix_ij X_j + post_i y [TOKENS, BLOCK], as it is stored."""
    b_v = b_post[i][:, None] * b_y.to(tl.float32)
    for j in tl.static_range(N):
        b_v += b_mix[i * N + j][:, None] * b_x[j].to(tl.float32)
    return b_v.to(dtype)


@triton.jit
def _once(b_x):
    """b_x, computed in one layout only: or else a matrix product's operand is computed a second time, in its layout."""
    if INTERPRETED or b_x.dtype == tl.float32:
        return b_x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [b_x], dtype=b_x.dtype, is_pure=False, pack=2)


@triton.jit
def write_kernel(
    x_ptr, y_ptr, post_ptr, mix_ptr, bias_ptr, phi_ptr, after_ptr, h_ptr, pre_ptr, sums_ptr,
    tokens, stride_post, stride_mix,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """X' of SHARE channels, and their part of z before the norm and of ‖X'‖²: SUMS numbers for each share and token.

    Without a projection, h of the channels, with pre the bias.
    φ [PARTS, K, ...] comes in the streams' dtype; two parts: rounded, and what rounding took from it, so that z is not
    rounded. A row of the product has RANK columns for each of them.
    """
    dtype: tl.constexpr = after_ptr.dtype.element_ty
    t = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    share, live, k = tl.program_id(0), t < tokens, tl.arange(0, RANK)
    column = tl.arange(0, PARTS * RANK)
    rows_ptr = phi_ptr + (column // RANK * (K * C * (N if NORM == "all" else 1)))[:, None]
    b_post = _numbers(post_ptr + t * stride_post, t, live, N)
    b_mix = _numbers(mix_ptr + t * stride_mix, t, live, N * N)
    b_z, b_square = tl.zeros([TOKENS, PARTS * RANK], tl.float32), ()
    for _ in tl.static_range(N):
        b_square = b_square + (tl.zeros([TOKENS], tl.float32),)
    for start in range(0, SHARE, BLOCK):
        c = share * SHARE + start + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_y = tl.load(y_ptr + t[:, None] * C + c[None, :], mask=mask, other=0.0)  # [TOKENS, BLOCK]
        b_x = _rows(x_ptr, t, c, mask, C, N)  # N of [TOKENS, BLOCK]
        b_all = tl.zeros([TOKENS, BLOCK], tl.float32)  # squares, or h
        for i in tl.static_range(N):
            # X'_i, and what it adds to z and the squares
            b_new = _once(_written(b_x, b_y, b_mix, b_post, i, N, dtype))
            tl.store(after_ptr + t[:, None] * (N * C) + i * C + c[None, :], b_new, mask=mask)
            if NORM == "none":
                b_all += tl.load(bias_ptr + i).to(tl.float32) * b_new.to(tl.float32)
            else:
                b_phi = _phi(rows_ptr, column % RANK, c, i, Z, K, C, N, NORM)  # [PARTS * RANK, BLOCK]
                b_z = tl.dot(b_new, tl.trans(b_phi), b_z, input_precision="ieee")  # [TOKENS, PARTS * RANK]
                b_v = b_new.to(tl.float32)
                if NORM == "all":
                    b_all += b_v * b_v
                else:
                    b_square = _replaced(b_square, i, b_square[i] + tl.sum(b_v * b_v, 1), N)
        if NORM == "all":
            b_square = _replaced(b_square, 0, b_square[0] + tl.sum(b_all, 1), N)
        if NORM == "none":
            tl.store(h_ptr + t[:, None] * C + c[None, :], b_all.to(dtype), mask=mask)
    if NORM == "none":
        for i in tl.static_range(N):
            b_pre = tl.zeros([TOKENS], tl.float32) + tl.load(bias_ptr + i).to(tl.float32)
            tl.store(pre_ptr + t * N + i, b_pre, mask=live & (share == 0))
    else:
        b_z = tl.sum(tl.reshape(b_z, [TOKENS, PARTS, RANK]), 1)
        to_ptr = sums_ptr + (share.to(tl.int64) * tokens + t) * SUMS
        tl.store(to_ptr[:, None] + k[None, :], b_z, mask=live[:, None] & (k < Z)[None, :])
        for i in tl.static_range(SUMS - Z):
            tl.store(to_ptr + Z + i, b_square[i], mask=live)


@triton.jit
def read_kernel(
    after_ptr, sums_ptr, scale_ptr, bias_ptr, gain_ptr, h_ptr, z_ptr, rstd_ptr, pre_ptr, h_stats_ptr,
    tokens, eps, norm_eps,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, SHARES: tl.constexpr, NORM: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """h, and z, rstd and pre of the tokens. The rows are asked for before their weights are computed."""
    dtype: tl.constexpr = h_ptr.dtype.element_ty
    TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live, k = t < tokens, tl.arange(0, RANK)
    b_tiles = ()
    for g in tl.static_range(TILES):
        c = g * BLOCK + tl.arange(0, BLOCK)
        b_tiles = b_tiles + (_rows(after_ptr, t, c, live[:, None] & (c < C)[None, :], C, N),)

    # z = RMS(X') φᵀ
    b_z, b_square = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
    is_z, own = live[:, None] & (k < Z)[None, :], k * 0 if NORM == "all" else k // K
    for share in tl.static_range(SHARES):
        from_ptr = sums_ptr + (tl.cast(share, tl.int64) * tokens + t[:, None]) * SUMS
        b_z += tl.load(from_ptr + k[None, :], mask=is_z, other=0.0)
        b_square += tl.load(from_ptr + Z + own[None, :], mask=is_z, other=0.0)
    b_rstd = tl.rsqrt(b_square / (C * N if NORM == "all" else C) + eps)
    tl.store(z_ptr + t[:, None] * Z + k[None, :], b_z * b_rstd, mask=is_z)
    tl.store(rstd_ptr + t[:, None] * Z + k[None, :], b_rstd, mask=is_z)

    # pre from its numbers of z, which are loaded again: taken out of b_z they would bring its layout to the tiles
    b_pre = ()
    for i in tl.static_range(N):
        b_own, b_length = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
        for share in tl.static_range(SHARES):
            from_ptr = sums_ptr + (tl.cast(share, tl.int64) * tokens + t) * SUMS
            b_own += tl.load(from_ptr + (i if NORM == "all" else i * K), mask=live, other=0.0)
            b_length += tl.load(from_ptr + Z + (0 if NORM == "all" else i), mask=live, other=0.0)
        b_own *= tl.rsqrt(b_length / (C * N if NORM == "all" else C) + eps)
        b_own = _weight(b_own, scale_ptr, bias_ptr, i, NORM)
        tl.store(pre_ptr + t * N + i, b_own, mask=live)
        b_pre = b_pre + (b_own,)

    # h = Σ_i pre_i X'_i
    if NORMED:
        store_normed(b_tiles, b_pre, gain_ptr, h_ptr, h_stats_ptr, t, live, norm_eps, C, N, TOKENS, BLOCK, TILES)
    else:
        for g in tl.static_range(TILES):
            c = g * BLOCK + tl.arange(0, BLOCK)
            b_h = tl.zeros([TOKENS, BLOCK], tl.float32)
            for i in tl.static_range(N):
                b_h += b_pre[i][:, None] * b_tiles[g][i].to(tl.float32)
            tl.store(h_ptr + t[:, None] * C + c[None, :], b_h.to(dtype), mask=live[:, None] & (c < C)[None, :])


@triton.jit
def sums_kernel(
    g_h_ptr, g_logits_ptr, x_ptr, y_ptr, post_ptr, mix_ptr, scale_ptr, gain_ptr, z_ptr, rstd_ptr, pre_ptr, h_stats_ptr,
    g_pre_ptr, g_z_ptr, shrink_ptr, pull_ptr, tokens, stride_post, stride_mix,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, HAS_LOGITS: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gradients of pre (of σ's argument for "all") and of z, the latter times rstd; the factors of X'_i in G_i."""
    TILES: tl.constexpr = (C + BLOCK - 1) // BLOCK
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live, k = t < tokens, tl.arange(0, RANK)
    b_dots = ()
    for _ in tl.static_range(N + 1):
        b_dots = b_dots + (tl.zeros([TOKENS, BLOCK], tl.float32),)
    # dh · X_j and dh · y, or u · X_j and u · y
    for g in tl.static_range(TILES):
        c = g * BLOCK + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_g_h = _tile(g_h_ptr, t[:, None] * C + c[None, :], mask)
        if NORMED:
            b_g_h *= gains(gain_ptr, t, c, mask)
        b_x = _rows(x_ptr, t, c, mask, C, N)
        b_new = ()
        for j in tl.static_range(N):
            b_new = b_new + (b_dots[j] + b_g_h * b_x[j].to(tl.float32),)
        b_dots = b_new + (b_dots[N] + b_g_h * _tile(y_ptr, t[:, None] * C + c[None, :], mask),)
    # the tokens' numbers, asked for before the sums, whose barriers no load can pass
    b_post = _numbers(post_ptr + t * stride_post, t, live, N)
    b_mix = _numbers(mix_ptr + t * stride_mix, t, live, N * N)
    b_pre = _numbers(pre_ptr + t * N, t, live, N)
    at, is_z = t[:, None] * Z + k[None, :], live[:, None] & (k < Z)[None, :]
    b_z = tl.load(z_ptr + at, mask=is_z, other=0.0)
    b_rstd = tl.load(rstd_ptr + at, mask=is_z, other=0.0)  # [TOKENS, RANK]
    b_dz = tl.zeros([TOKENS, RANK], tl.float32)
    if HAS_LOGITS:
        b_dz = tl.load(g_logits_ptr + at, mask=is_z, other=0.0).to(tl.float32)
    b_sums = ()
    for j in tl.static_range(N + 1):
        b_sums = b_sums + (tl.sum(b_dots[j], 1),)

    # the gradient of pre_i, dh · X'_i = post_i dh·y + Σ_j mix_ij dh·X_j, and through it dz
    b_hx = ()
    for i in tl.static_range(N):
        b_g = b_post[i] * b_sums[N]
        for j in tl.static_range(N):
            b_g += b_mix[i * N + j] * b_sums[j]
        b_hx = b_hx + (b_g,)
    if NORMED:
        b_hx = through_norm(b_hx, b_pre, h_stats_ptr, pull_ptr, t, live, C, N)
    for i in tl.static_range(N):
        b_g = b_hx[i]
        if NORM == "all":
            b_g *= b_pre[i] * (1 - b_pre[i])
            b_step = b_g
        else:
            b_t = _tanh(_tile(z_ptr, t * Z + i * K, live))
            b_step = b_g * (1 - b_t * b_t)
        b_step *= tl.load(scale_ptr).to(tl.float32)
        b_dz += tl.where((k == (i if NORM == "all" else i * K))[None, :], b_step[:, None], 0.0)
        tl.store(g_pre_ptr + t * N + i, b_g, mask=live)
    # rstd dz, and rstd²/D Σ_k dz_k z_k
    b_back = b_rstd * b_rstd * b_dz * b_z / (C * N if NORM == "all" else C)
    tl.store(g_z_ptr + at, b_dz * b_rstd, mask=is_z)
    for i in tl.static_range(N):
        b_own = tl.sum(tl.where(_belongs(k, i, K, NORM)[None, :], b_back, 0.0), 1)
        tl.store(shrink_ptr + t * N + i, b_own, mask=live)


@triton.jit
def _fold(b_x, LANES: tl.constexpr):
    """[TOKENS, BLOCK] to [TOKENS, LANES]: the channels that one thread holds, summed."""
    return tl.sum(tl.reshape(b_x, [b_x.shape[0], LANES, b_x.shape[1] // LANES]), 2)


@triton.jit
def _gradient_tiles(g_after_ptr, g_h_ptr, x_ptr, y_ptr, t, c, live, C: tl.constexpr, N: tl.constexpr,
                    HAS_AFTER: tl.constexpr):  # fmt: skip
    """X, the gradient of X' if there is one, y and dh [TOKENS, BLOCK], as they are stored."""
    mask, at = live[:, None] & (c < C)[None, :], t[:, None] * C + c[None, :]
    b_x, b_after = _rows(x_ptr, t, c, mask, C, N), ()
    if HAS_AFTER:
        b_after = _rows(g_after_ptr, t, c, mask, C, N)
    return b_x, b_after, tl.load(y_ptr + at, mask=mask, other=0.0), tl.load(g_h_ptr + at, mask=mask, other=0.0)


@triton.jit
def spread_kernel(
    g_after_ptr, g_h_ptr, g_z_ptr, shrink_ptr, x_ptr, y_ptr, post_ptr, mix_ptr, pre_ptr, phi_ptr,
    gain_ptr, h_stats_ptr, pull_ptr,
    g_x_ptr, g_y_ptr, g_post_ptr, g_mix_ptr, g_pre_ptr, partial_ptr, tokens, stride_post, stride_mix,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
    HAS_AFTER: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """G_i = g_X'_i + pre_i dh + (rstd dz) φ_i − shrink_i X'_i, and the gradients of X, y, mix and post.

    Without a projection also that of pre_i, dh · X'_i. NORMED: also the tokens' part of the gain's, a row of `partial`.

    The product with φ is computed transposed and before the tiles are loaded: so they keep the layout in which they
    are loaded, and only the product is brought into it. No load can pass its barriers: hence all of φ is loaded before
    the first product, and the tiles AHEAD = 1 blocks early.
    """
    dtype: tl.constexpr = g_x_ptr.dtype.element_ty
    t = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live, k = t < tokens, tl.arange(0, RANK)
    b_post = _numbers(post_ptr + t * stride_post, t, live, N)
    b_mix = _numbers(mix_ptr + t * stride_mix, t, live, N * N)
    b_pre = _numbers(pre_ptr + t * N, t, live, N)
    if NORM != "none":
        b_shrink = _numbers(shrink_ptr + t * N, t, live, N)
        is_z = live[None, :] & (k < Z)[:, None]
        b_dz = tl.load(g_z_ptr + t[None, :] * Z + k[:, None], mask=is_z, other=0.0).to(dtype)  # [RANK, TOKENS]
    if NORMED:
        b_factors = read_factors(b_post, b_mix, b_pre, N)
        b_r, b_pull = _tile(h_stats_ptr + t * (N + 1), N, live), _tile(pull_ptr, t, live)
    EXTRA: tl.constexpr = N if NORM == "none" else 0
    b_sums = ()
    for _ in tl.static_range(N * N + N + EXTRA):
        b_sums = b_sums + (tl.zeros([TOKENS, LANES], tl.float32),)
    if AHEAD:
        b_next = _gradient_tiles(g_after_ptr, g_h_ptr, x_ptr, y_ptr, t, tl.arange(0, BLOCK), live, C, N, HAS_AFTER)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_phi, b_through = (), ()
        if NORMED:
            b_gain = gains(gain_ptr, t, c, mask)
        if NORM != "none":
            for i in tl.static_range(N):
                b_phi = b_phi + (_phi(phi_ptr, k, c, i, Z, K, C, N, NORM),)  # [RANK, BLOCK]
            for i in tl.static_range(N):
                b_through = b_through + (tl.trans(tl.dot(tl.trans(b_phi[i]), b_dz, input_precision="ieee")),)
        b_read = _gradient_tiles(g_after_ptr, g_h_ptr, x_ptr, y_ptr, t, c + AHEAD * BLOCK, live, C, N, HAS_AFTER)
        if AHEAD:
            b_now, b_next = b_next, b_read
        else:
            b_now = b_read
        b_x, b_after, b_y, b_g_h = b_now
        b_y, b_g_h, b_g_x = b_y.to(tl.float32), b_g_h.to(tl.float32), ()
        if NORMED:
            b_g_h, b_of_gain = hidden_gradient(b_g_h, b_gain, b_x, b_y, b_factors, b_r, b_pull, N)
        for _ in tl.static_range(N):
            b_g_x = b_g_x + (tl.zeros([TOKENS, BLOCK], tl.float32),)
        b_g_y = tl.zeros([TOKENS, BLOCK], tl.float32)
        b_new_sums = ()
        for i in tl.static_range(N):
            b_G = b_pre[i][:, None] * b_g_h
            if HAS_AFTER:
                b_G += b_after[i].to(tl.float32)
            if NORM != "none":
                b_new = _written(b_x, b_y, b_mix, b_post, i, N, dtype).to(tl.float32)
                b_G += b_through[i] - b_shrink[i][:, None] * b_new
            b_g_y += b_post[i][:, None] * b_G
            b_more = ()
            for j in tl.static_range(N):
                b_more = b_more + (b_g_x[j] + b_mix[i * N + j][:, None] * b_G,)
                b_new_sums = b_new_sums + (b_sums[i * (N + 1) + j] + _fold(b_G * b_x[j].to(tl.float32), LANES),)
            b_g_x = b_more
            b_new_sums = b_new_sums + (b_sums[i * (N + 1) + N] + _fold(b_G * b_y, LANES),)
        if NORM == "none":
            for i in tl.static_range(N):
                b_new = _written(b_x, b_y, b_mix, b_post, i, N, dtype).to(tl.float32)
                b_new_sums = b_new_sums + (b_sums[N * N + N + i] + _fold(b_g_h * b_new, LANES),)
        b_sums = b_new_sums
        tl.store(g_y_ptr + t[:, None] * C + c[None, :], b_g_y.to(dtype), mask=mask)
        for j in tl.static_range(N):
            tl.store(g_x_ptr + t[:, None] * (N * C) + j * C + c[None, :], b_g_x[j].to(dtype), mask=mask)
        if NORMED:  # at the end, where few values are held across its barriers
            tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(b_of_gain, 0), mask=c < C)
    for i in tl.static_range(N):
        for j in tl.static_range(N):
            tl.store(g_mix_ptr + t * (N * N) + i * N + j, tl.sum(b_sums[i * (N + 1) + j], 1), mask=live)
        tl.store(g_post_ptr + t * N + i, tl.sum(b_sums[i * (N + 1) + N], 1), mask=live)
        if NORM == "none":
            tl.store(g_pre_ptr + t * N + i, tl.sum(b_sums[N * N + N + i], 1), mask=live)


@triton.jit
def phi_kernel(
    g_z_ptr, x_ptr, partial_ptr, rows, each,
    W: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The part of φ's gradient g_zᵀ x [K, W] that `each` rows of x [rows, W] have: one matrix of `partial`."""
    part, k, c = tl.program_id(1), tl.arange(0, RANK), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([RANK, BLOCK], tl.float32)
    for start in range(0, each, ROWS):
        t = part.to(tl.int64) * each + start + tl.arange(0, ROWS)
        live = t < rows
        b_g = tl.load(g_z_ptr + t[None, :] * K + k[:, None], mask=live[None, :] & (k < K)[:, None], other=0.0)
        b_x = tl.load(x_ptr + t[:, None] * W + c[None, :], mask=live[:, None] & (c < W)[None, :], other=0.0)
        b_sum = tl.dot(b_g.to(b_x.dtype), b_x, b_sum, input_precision="ieee")
    to_ptr = partial_ptr + part.to(tl.int64) * (K * W) + k[:, None] * W + c[None, :]
    tl.store(to_ptr, b_sum, mask=(k < K)[:, None] & (c < W)[None, :])
