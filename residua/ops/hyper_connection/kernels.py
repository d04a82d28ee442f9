"""Hyper-connections on the GPU: a junction's write, the next one's weights and its read in one pass over the streams.

    X'_i = Σ_j mix_ij X_j + post_i y,   z = RMS(X') φᵀ,   h = Σ_i pre_i X'_i,   pre from z

TOKENS rows at a time, in blocks of BLOCK channels. The first sweep writes X'; the second finds it in the cache and sums
‖X'‖² and the products with φ, small matrix products over the tile, which give pre; the third computes h.
Backward likewise: for pre's gradient dh · X'_i the first sweep needs only dh · X_j and dh · y, and X' is recomputed
from X and y, not read.

NORM says where z comes from. "all": RMS over all streams as one vector, φ [K, N·C], pre_i = σ(scale z_i + bias_i);
"each": RMS of each stream, φ [K, C], z [N, K], pre_i = bias_i + scale tanh(z_i0); "none": no z, pre_i = bias_i.
Either way z is one row of Z numbers in a tile of RANK columns, K of which, or all, belong to a stream.

The per-token weights (mix_ij, post_i) are loaded where they are used: held, they would fill the registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x_ptr, at, mask):
    return tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _replaced(values, t: tl.constexpr, value, COUNT: tl.constexpr):
    changed = ()
    for g in tl.static_range(COUNT):
        if g == t:
            changed = changed + (value,)
        else:
            changed = changed + (values[g],)
    return changed


@triton.jit
def _streams(x_ptr, t, c, mask, C: tl.constexpr, N: tl.constexpr):
    """The tiles [TOKENS, BLOCK] of all N streams."""
    b_tiles = ()
    for j in tl.static_range(N):
        b_tiles = b_tiles + (_tile(x_ptr, t[:, None] * (N * C) + j * C + c[None, :], mask),)
    return b_tiles


@triton.jit
def _mixed(b_x, b_y, mix_ptr, post_ptr, i, live, N: tl.constexpr, dtype: tl.constexpr):
    """X'_i = Σ_j mix_ij X_j + post_i y [TOKENS, BLOCK], as it is stored; pointers to the tokens' weights."""
    b_v = _tile(post_ptr, i, live)[:, None] * b_y
    for j in tl.static_range(N):
        b_v += _tile(mix_ptr, i * N + j, live)[:, None] * b_x[j]
    return b_v.to(dtype)


@triton.jit
def _belongs(k, i, K: tl.constexpr, NORM: tl.constexpr):
    """Which columns of z stream i has a part in."""
    return k >= 0 if NORM == "all" else k // K == i


@triton.jit
def _phi(phi_ptr, k, c, i, Z: tl.constexpr, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr):
    """φ of stream i as [RANK, BLOCK]."""
    at_ptr = phi_ptr + ((k * N + i) * C if NORM == "all" else k % K * C)[:, None] + c[None, :]
    mask = ((k < Z) & _belongs(k, i, K, NORM))[:, None] & (c < C)[None, :]
    return tl.load(at_ptr, mask=mask, other=0.0)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _weight(b_z, scale_ptr, bias_ptr, i, NORM: tl.constexpr):
    """pre_i, from its column of z."""
    b = tl.load(bias_ptr + i).to(tl.float32)
    if NORM == "all":
        return tl.sigmoid(tl.load(scale_ptr).to(tl.float32) * b_z + b)
    return b + tl.load(scale_ptr).to(tl.float32) * _tanh(b_z)


@triton.jit
def forward_kernel(
    x_ptr, y_ptr, post_ptr, mix_ptr, scale_ptr, bias_ptr, phi_ptr, rest_ptr, after_ptr, h_ptr, z_ptr, rstd_ptr, pre_ptr,
    tokens, stride_post, stride_mix, eps,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """φ comes in the streams' dtype; SPLIT: with the rest that rounding took from it, so that z is not rounded.

    Each sweep loads its tiles again, after a barrier: tiles shared with a matrix product would take its layout, in
    which every warp holds all of them.
    """
    dtype: tl.constexpr = after_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    k = tl.arange(0, RANK)
    post_ptr, mix_ptr = post_ptr + t * stride_post, mix_ptr + t * stride_mix

    # first sweep: X'_i = Σ_j mix_ij X_j + post_i y
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_y = _tile(y_ptr, t[:, None] * C + c[None, :], mask)  # [TOKENS, BLOCK]
        b_x = _streams(x_ptr, t, c, mask, C, N)  # N of [TOKENS, BLOCK]
        for i in range(N):
            b_new = _mixed(b_x, b_y, mix_ptr, post_ptr, i, live, N, dtype)
            tl.store(after_ptr + t[:, None] * (N * C) + i * C + c[None, :], b_new, mask=mask)
    tl.debug_barrier()

    # second sweep: z = RMS(X') φᵀ, and pre from z
    if NORM == "none":
        for i in range(N):
            tl.store(pre_ptr + t * N + i, tl.zeros([TOKENS], tl.float32) + tl.load(bias_ptr + i), mask=live)
    else:
        b_z, b_square = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
        for i in range(N):
            b_own = tl.zeros([TOKENS], tl.float32)
            for first in range(0, C, BLOCK):
                c = first + tl.arange(0, BLOCK)
                at, mask = t[:, None] * (N * C) + i * C + c[None, :], live[:, None] & (c < C)[None, :]
                b_raw = tl.load(after_ptr + at, mask=mask, other=0.0)  # [TOKENS, BLOCK]
                b_z = tl.dot(b_raw, tl.trans(_phi(phi_ptr, k, c, i, Z, K, C, N, NORM)), b_z, input_precision="ieee")
                if SPLIT:
                    b_z = tl.dot(
                        b_raw, tl.trans(_phi(rest_ptr, k, c, i, Z, K, C, N, NORM)), b_z, input_precision="ieee"
                    )
                b_v = b_raw.to(tl.float32)
                b_own += tl.sum(b_v * b_v, 1)
            b_square += tl.where(_belongs(k, i, K, NORM)[None, :], b_own[:, None], 0.0)
        b_rstd = tl.rsqrt(b_square / (C * N if NORM == "all" else C) + eps)  # [TOKENS, RANK]
        b_z *= b_rstd
        at = t[:, None] * Z + k[None, :]
        tl.store(z_ptr + at, b_z, mask=live[:, None] & (k < Z)[None, :])
        tl.store(rstd_ptr + at, b_rstd, mask=live[:, None] & (k < Z)[None, :])
        for i in range(N):
            b_own = tl.sum(tl.where((k == (i if NORM == "all" else i * K))[None, :], b_z, 0.0), 1)
            tl.store(pre_ptr + t * N + i, _weight(b_own, scale_ptr, bias_ptr, i, NORM), mask=live)
    tl.debug_barrier()

    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        # third sweep: h = Σ_j pre_j X'_j
        b_h = tl.zeros([TOKENS, BLOCK], tl.float32)
        for j in tl.static_range(N):
            b_pre = _tile(pre_ptr, t * N + j, live)  # [TOKENS]
            b_h += b_pre[:, None] * _tile(after_ptr, t[:, None] * (N * C) + j * C + c[None, :], mask)
        tl.store(h_ptr + t[:, None] * C + c[None, :], b_h.to(dtype), mask=mask)


@triton.jit
def backward_kernel(
    g_after_ptr, g_h_ptr, g_logits_ptr, x_ptr, y_ptr, post_ptr, mix_ptr, scale_ptr, phi_ptr, z_ptr, rstd_ptr, pre_ptr,
    g_x_ptr, g_y_ptr, g_post_ptr, g_mix_ptr, g_pre_ptr, g_z_ptr, tokens, stride_post, stride_mix,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SQUARE: tl.constexpr,
    HAS_AFTER: tl.constexpr, HAS_LOGITS: tl.constexpr,
):  # fmt: skip
    """With D the length of a normed vector and dz the whole gradient of z, pre's part included:

    G_i = g_X'_i + pre_i dh + rstd dz φ_i − X'_i rstd²/D Σ_k dz_k z_k
    g_X_j = Σ_i mix_ij G_i,   g_y = Σ_i post_i G_i,   g_mix_ij = G_i · X_j,   g_post_i = G_i · y

    `g_pre` is the gradient of σ's argument for "all", of pre otherwise; `g_z` is rstd dz, from which φ's gradient is a
    matrix product with X'. SQUARE is N(N + 1), the numbers of g_mix and g_post, rounded up to a power of two.
    Until they are written, g_X holds rstd dz φ and g_post the factor of X': as in the forward kernel, what comes out of
    a matrix product must not pass its layout on.
    """
    dtype: tl.constexpr = g_x_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    k = tl.arange(0, RANK)
    post_ptr, mix_ptr = post_ptr + t * stride_post, mix_ptr + t * stride_mix

    # first sweep: dh · y and dh · X_j
    b_hy, b_hx = tl.zeros([TOKENS], tl.float32), ()
    for _ in tl.static_range(N):
        b_hx = b_hx + (tl.zeros([TOKENS], tl.float32),)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_g_h = _tile(g_h_ptr, t[:, None] * C + c[None, :], mask)
        b_hy += tl.sum(b_g_h * _tile(y_ptr, t[:, None] * C + c[None, :], mask), 1)
        for j in tl.static_range(N):
            b_dot = tl.sum(b_g_h * _tile(x_ptr, t[:, None] * (N * C) + j * C + c[None, :], mask), 1)
            b_hx = _replaced(b_hx, j, b_hx[j] + b_dot, N)

    # the gradient of pre_i, dh · X'_i = post_i dh·y + Σ_j mix_ij dh·X_j, and through it dz
    at, is_z = t[:, None] * Z + k[None, :], live[:, None] & (k < Z)[None, :]
    b_z, b_dz = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
    if NORM != "none":
        b_z = tl.load(z_ptr + at, mask=is_z, other=0.0)
    if HAS_LOGITS:
        b_dz = tl.load(g_logits_ptr + at, mask=is_z, other=0.0).to(tl.float32)
    for i in range(N):
        b_g = _tile(post_ptr, i, live) * b_hy
        for j in tl.static_range(N):
            b_g += _tile(mix_ptr, i * N + j, live) * b_hx[j]
        if NORM != "none":
            column = (k == (i if NORM == "all" else i * K))[None, :]
            if NORM == "all":
                b_pre = _tile(pre_ptr, t * N + i, live)
                b_g *= b_pre * (1 - b_pre)
                b_step = b_g
            else:
                b_t = _tanh(_tile(z_ptr, t * Z + i * K, live))
                b_step = b_g * (1 - b_t * b_t)
            b_dz += tl.where(column, (tl.load(scale_ptr).to(tl.float32) * b_step)[:, None], 0.0)
        tl.store(g_pre_ptr + t * N + i, b_g, mask=live)
    if NORM != "none":
        # rstd dz φ_i, and the factor rstd²/D Σ_k dz_k z_k of X'_i
        b_rstd = tl.load(rstd_ptr + at, mask=is_z, other=0.0)  # [TOKENS, RANK]
        b_back = b_rstd * b_rstd * b_dz * b_z / (C * N if NORM == "all" else C)
        b_dz *= b_rstd
        tl.store(g_z_ptr + at, b_dz, mask=is_z)
        b_dz = b_dz.to(dtype)
        for i in range(N):
            for first in range(0, C, BLOCK):
                c = first + tl.arange(0, BLOCK)
                mask = live[:, None] & (c < C)[None, :]
                b_through = tl.dot(b_dz, _phi(phi_ptr, k, c, i, Z, K, C, N, NORM), input_precision="ieee")
                tl.store(g_x_ptr + t[:, None] * (N * C) + i * C + c[None, :], b_through.to(dtype), mask=mask)
            b_shrink = tl.sum(tl.where(_belongs(k, i, K, NORM)[None, :], b_back, 0.0), 1)
            tl.store(g_post_ptr + t * N + i, b_shrink, mask=live)
        tl.debug_barrier()

    s = tl.arange(0, SQUARE)
    # last sweep: G_i, and from it all the gradients
    b_sums = tl.zeros([TOKENS, SQUARE], tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_y = _tile(y_ptr, t[:, None] * C + c[None, :], mask)
        b_g_h = _tile(g_h_ptr, t[:, None] * C + c[None, :], mask)
        b_x, b_g_x = _streams(x_ptr, t, c, mask, C, N), ()
        for _ in tl.static_range(N):
            b_g_x = b_g_x + (tl.zeros([TOKENS, BLOCK], tl.float32),)
        b_g_y = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i in range(N):
            b_G = _tile(pre_ptr, t * N + i, live)[:, None] * b_g_h
            if HAS_AFTER:
                b_G += _tile(g_after_ptr, t[:, None] * (N * C) + i * C + c[None, :], mask)
            if NORM != "none":
                b_G += _tile(g_x_ptr, t[:, None] * (N * C) + i * C + c[None, :], mask)
                b_shrink = _tile(g_post_ptr, t * N + i, live)
                b_G -= b_shrink[:, None] * _mixed(b_x, b_y, mix_ptr, post_ptr, i, live, N, dtype).to(tl.float32)
            b_g_y += _tile(post_ptr, i, live)[:, None] * b_G
            b_sums += tl.where((s == N * N + i)[None, :], tl.sum(b_G * b_y, 1)[:, None], 0.0)
            for j in tl.static_range(N):
                b_g_x = _replaced(b_g_x, j, b_g_x[j] + _tile(mix_ptr, i * N + j, live)[:, None] * b_G, N)
                b_sums += tl.where((s == i * N + j)[None, :], tl.sum(b_G * b_x[j], 1)[:, None], 0.0)
        tl.store(g_y_ptr + t[:, None] * C + c[None, :], b_g_y.to(dtype), mask=mask)
        tl.debug_barrier()
        for j in tl.static_range(N):
            tl.store(g_x_ptr + t[:, None] * (N * C) + j * C + c[None, :], b_g_x[j].to(dtype), mask=mask)
    tl.debug_barrier()
    to_mix, to_post = s < N * N, (s >= N * N) & (s < N * N + N)
    tl.store(g_mix_ptr + t[:, None] * (N * N) + s[None, :], b_sums, mask=live[:, None] & to_mix[None, :])
    tl.store(g_post_ptr + t[:, None] * N + s[None, :] - N * N, b_sums, mask=live[:, None] & to_post[None, :])
