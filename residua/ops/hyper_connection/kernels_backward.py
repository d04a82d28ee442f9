"""Hyper-connections on the GPU, backward; the letters are those of `kernels.py`.

With D the length of a normed vector and dz the whole gradient of z, pre's part included:

    G_i = g_X'_i + pre_i dh + rstd dz φ_i − X'_i rstd²/D Σ_k dz_k z_k
    g_X_j = Σ_i mix_ij G_i,   g_y = Σ_i post_i G_i,   g_mix_ij = G_i · X_j,   g_post_i = G_i · y

`g_pre` is the gradient of σ's argument for "all", of pre otherwise; `g_z` is rstd dz, from which φ's gradient is a
matrix product with X'.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.hyper_connection.kernels import _belongs, _numbers, _phi, _rows, _tanh, _tile, _written, gains


@triton.jit
def through_norm(b_ux, b_pre, h_stats_ptr, pull_ptr, t, live, C: tl.constexpr, N: tl.constexpr):
    """g_h·X'_i from u·X'_i, each N of [TOKENS]; stores p."""
    stats_ptr = h_stats_ptr + t * (N + 1)
    b_r, b_uh = _tile(stats_ptr, N, live), b_pre[0] * b_ux[0]
    for i in tl.static_range(1, N):
        b_uh += b_pre[i] * b_ux[i]
    b_pull = b_r * b_r * b_r / C * b_uh
    tl.store(pull_ptr + t, b_pull, mask=live)
    b_hx = ()
    for i in tl.static_range(N):
        b_hx = b_hx + (b_r * b_ux[i] - b_pull * _tile(stats_ptr, i, live),)
    return b_hx


@triton.jit
def read_factors(b_post, b_mix, b_pre, N: tl.constexpr):
    """The factors of X_0 to X_{N−1} and of y in h."""
    b_factors = ()
    for j in tl.static_range(N):
        b_factor = b_pre[0] * b_mix[j]
        for i in tl.static_range(1, N):
            b_factor += b_pre[i] * b_mix[i * N + j]
        b_factors = b_factors + (b_factor,)
    b_factor = b_pre[0] * b_post[0]
    for i in tl.static_range(1, N):
        b_factor += b_pre[i] * b_post[i]
    return b_factors + (b_factor,)


@triton.jit
def hidden_gradient(b_g_x, b_gain, b_x, b_y, b_factors, b_r, b_pull, N: tl.constexpr):
    """g_h and g_x ⊙ h·r, whose sum over tokens is the gain's gradient [TOKENS, BLOCK]."""
    b_h = b_factors[N][:, None] * b_y
    for j in tl.static_range(N):
        b_h += b_factors[j][:, None] * b_x[j].to(tl.float32)
    b_g_x = b_r[:, None] * b_g_x
    return b_g_x * b_gain - b_pull[:, None] * b_h, b_g_x * b_h


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
def through_given(
    g_logits_ptr, z_ptr, rstd_ptr, g_z_ptr, t, k, live,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, TOKENS: tl.constexpr, RANK: tl.constexpr,
    NORM: tl.constexpr, HAS_LOGITS: tl.constexpr,
):  # fmt: skip
    """rstd dz [RANK, TOKENS], which it also stores, and the factors of X'_i in G_i, where z makes no weight of h."""
    at, is_z = t[None, :] * Z + k[:, None], live[None, :] & (k < Z)[:, None]
    b_dz = tl.zeros([RANK, TOKENS], tl.float32)
    if HAS_LOGITS:
        b_dz = _tile(g_logits_ptr, at, is_z) * _tile(rstd_ptr, at, is_z)
    tl.store(g_z_ptr + at, b_dz, mask=is_z)
    b_back, b_shrink = b_dz * _tile(rstd_ptr, at, is_z) * _tile(z_ptr, at, is_z) / C, ()
    for i in tl.static_range(N):
        b_shrink = b_shrink + (tl.sum(tl.where(_belongs(k, i, K, NORM)[:, None], b_back, 0.0), 0),)
    return b_dz, b_shrink


@triton.jit
def spread_kernel(
    g_after_ptr, g_h_ptr, g_z_ptr, shrink_ptr, x_ptr, y_ptr, post_ptr, mix_ptr, pre_ptr, phi_ptr,
    gain_ptr, h_stats_ptr, pull_ptr,
    g_x_ptr, g_y_ptr, g_post_ptr, g_mix_ptr, g_pre_ptr, partial_ptr, g_logits_ptr, z_ptr, rstd_ptr,
    tokens, stride_post, stride_mix,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr,
    HAS_AFTER: tl.constexpr, NORMED: tl.constexpr, GIVEN: tl.constexpr, HAS_LOGITS: tl.constexpr,
):  # fmt: skip
    """G_i = g_X'_i + pre_i dh + (rstd dz) φ_i − shrink_i X'_i, and the gradients of X, y, mix and post.

    Without a projection, or with pre GIVEN, also that of pre_i, dh · X'_i; GIVEN: also rstd dz, as `sums` has it.
    NORMED: also the tokens' part of the gain's, a row of `partial`.

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
    if GIVEN:
        b_dz, b_shrink = through_given(
            g_logits_ptr, z_ptr, rstd_ptr, g_z_ptr, t, k, live, C, N, K, Z, TOKENS, RANK, NORM, HAS_LOGITS
        )
        b_dz = b_dz.to(dtype)
    elif NORM != "none":
        b_shrink = _numbers(shrink_ptr + t * N, t, live, N)
        is_z = live[None, :] & (k < Z)[:, None]
        b_dz = tl.load(g_z_ptr + t[None, :] * Z + k[:, None], mask=is_z, other=0.0).to(dtype)  # [RANK, TOKENS]
    if NORMED:
        b_factors = read_factors(b_post, b_mix, b_pre, N)
        b_r, b_pull = _tile(h_stats_ptr + t * (N + 1), N, live), _tile(pull_ptr, t, live)
    READS: tl.constexpr = NORM == "none" or GIVEN
    EXTRA: tl.constexpr = N if READS else 0
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
        if READS:
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
        if READS:
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
