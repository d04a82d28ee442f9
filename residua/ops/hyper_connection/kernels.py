"""Hyper-connections on the GPU: a junction's write, the next one's weights and its read in one pass over the streams.

    X'_i = Σ_j mix_ij X_j + post_i y,   z = RMS(X') φᵀ,   h = Σ_i pre_i X'_i,   pre from z

TOKENS rows at a time, in blocks of BLOCK channels. The first sweep writes X'; the second finds it in the cache and sums
‖X'‖² and the products with φ, small matrix products over the tile; from these pre follows, and the third makes h.
Backward likewise: of pre's gradient dh · X'_i the first sweep needs only dh · X_j and dh · y, and X' is made again from
X and y, not read.

NORM says where z comes from. "all": RMS over all streams as one vector, φ [K, N·C], pre_i = σ(scale z_i + bias_i);
"each": RMS of each stream, φ [K, C], z [N, K], pre_i = bias_i + scale tanh(z_i0); "none": no z, pre_i = bias_i.
Either way z is one row of Z numbers in a tile of RANK columns, K of which, or all, belong to a stream.

What a stream brings along per token (mix_ij, post_i) is loaded where it is used: held, it would fill the registers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, at, mask):
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


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
def _streams(x, rows, c, mask, C: tl.constexpr, N: tl.constexpr):
    """The streams' tiles."""
    tiles = ()
    for j in tl.static_range(N):
        tiles = tiles + (_tile(x, rows[:, None] * (N * C) + j * C + c[None, :], mask),)
    return tiles


@triton.jit
def _mixed(x, y, mix, post, i, inside, N: tl.constexpr, dtype: tl.constexpr):
    """X'_i as it is stored, from the streams' tiles; `mix` and `post` point at the tokens' numbers."""
    v = _tile(post, i, inside)[:, None] * y
    for j in tl.static_range(N):
        v += _tile(mix, i * N + j, inside)[:, None] * x[j]
    return v.to(dtype)


@triton.jit
def _belongs(k, i, K: tl.constexpr, NORM: tl.constexpr):
    """Which columns of z stream i has a part in."""
    return k >= 0 if NORM == "all" else k // K == i


@triton.jit
def _phi(phi, k, c, i, Z: tl.constexpr, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, NORM: tl.constexpr):
    """φ of stream i as [RANK, BLOCK]."""
    at = phi + ((k * N + i) * C if NORM == "all" else k % K * C)[:, None] + c[None, :]
    mask = ((k < Z) & _belongs(k, i, K, NORM))[:, None] & (c < C)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _weight(z, scale, bias, i, NORM: tl.constexpr):
    """pre_i, from its column of z."""
    b = tl.load(bias + i).to(tl.float32)
    if NORM == "all":
        return tl.sigmoid(tl.load(scale).to(tl.float32) * z + b)
    return b + tl.load(scale).to(tl.float32) * _tanh(z)


@triton.jit
def forward_kernel(
    streams, update, post, mix, scale, bias, phi, rest, after, hidden, logits, rstds, weights,
    tokens, post_stride, mix_stride, eps,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """φ comes in the streams' dtype; SPLIT: with the rest that rounding took from it, so that z is not rounded.

    Each sweep loads its tiles anew, behind a barrier: tiles shared with a matrix product would take its layout, in
    which every warp holds them all.
    """
    dtype: tl.constexpr = after.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = rows < tokens
    k = tl.arange(0, RANK)
    post, mix = post + rows * post_stride, mix + rows * mix_stride

    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (c < C)[None, :]
        y = _tile(update, rows[:, None] * C + c[None, :], mask)
        x = _streams(streams, rows, c, mask, C, N)
        for i in range(N):
            new = _mixed(x, y, mix, post, i, inside, N, dtype)
            tl.store(after + rows[:, None] * (N * C) + i * C + c[None, :], new, mask=mask)
    tl.debug_barrier()

    if NORM == "none":
        for i in range(N):
            tl.store(weights + rows * N + i, tl.zeros([TOKENS], tl.float32) + tl.load(bias + i), mask=inside)
    else:
        z, square = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
        for i in range(N):
            own = tl.zeros([TOKENS], tl.float32)
            for first in range(0, C, BLOCK):
                c = first + tl.arange(0, BLOCK)
                at, mask = rows[:, None] * (N * C) + i * C + c[None, :], inside[:, None] & (c < C)[None, :]
                raw = tl.load(after + at, mask=mask, other=0.0)
                z = tl.dot(raw, tl.trans(_phi(phi, k, c, i, Z, K, C, N, NORM)), z, input_precision="ieee")
                if SPLIT:
                    z = tl.dot(raw, tl.trans(_phi(rest, k, c, i, Z, K, C, N, NORM)), z, input_precision="ieee")
                v = raw.to(tl.float32)
                own += tl.sum(v * v, 1)
            square += tl.where(_belongs(k, i, K, NORM)[None, :], own[:, None], 0.0)
        rstd = tl.rsqrt(square / (C * N if NORM == "all" else C) + eps)
        z *= rstd
        at = rows[:, None] * Z + k[None, :]
        tl.store(logits + at, z, mask=inside[:, None] & (k < Z)[None, :])
        tl.store(rstds + at, rstd, mask=inside[:, None] & (k < Z)[None, :])
        for i in range(N):
            own = tl.sum(tl.where((k == (i if NORM == "all" else i * K))[None, :], z, 0.0), 1)
            tl.store(weights + rows * N + i, _weight(own, scale, bias, i, NORM), mask=inside)
    tl.debug_barrier()

    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (c < C)[None, :]
        h = tl.zeros([TOKENS, BLOCK], tl.float32)
        for j in tl.static_range(N):
            pre = _tile(weights, rows * N + j, inside)
            h += pre[:, None] * _tile(after, rows[:, None] * (N * C) + j * C + c[None, :], mask)
        tl.store(hidden + rows[:, None] * C + c[None, :], h.to(dtype), mask=mask)


@triton.jit
def backward_kernel(
    g_after, g_hidden, g_logits, streams, update, post, mix, scale, phi, logits, rstds, weights,
    g_streams, g_update, g_post, g_mix, g_pre, g_z, tokens, post_stride, mix_stride,
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
    dtype: tl.constexpr = g_streams.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = rows < tokens
    k = tl.arange(0, RANK)
    post, mix = post + rows * post_stride, mix + rows * mix_stride

    hy, hx = tl.zeros([TOKENS], tl.float32), ()
    for _ in tl.static_range(N):
        hx = hx + (tl.zeros([TOKENS], tl.float32),)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (c < C)[None, :]
        h = _tile(g_hidden, rows[:, None] * C + c[None, :], mask)
        hy += tl.sum(h * _tile(update, rows[:, None] * C + c[None, :], mask), 1)
        for j in tl.static_range(N):
            dot = tl.sum(h * _tile(streams, rows[:, None] * (N * C) + j * C + c[None, :], mask), 1)
            hx = _replaced(hx, j, hx[j] + dot, N)

    at, known = rows[:, None] * Z + k[None, :], inside[:, None] & (k < Z)[None, :]
    z, dz = tl.zeros([TOKENS, RANK], tl.float32), tl.zeros([TOKENS, RANK], tl.float32)
    if NORM != "none":
        z = tl.load(logits + at, mask=known, other=0.0)
    if HAS_LOGITS:
        dz = tl.load(g_logits + at, mask=known, other=0.0).to(tl.float32)
    for i in range(N):
        g = _tile(post, i, inside) * hy
        for j in tl.static_range(N):
            g += _tile(mix, i * N + j, inside) * hx[j]
        if NORM != "none":
            column = (k == (i if NORM == "all" else i * K))[None, :]
            if NORM == "all":
                pre = _tile(weights, rows * N + i, inside)
                g *= pre * (1 - pre)
                step = g
            else:
                t = _tanh(_tile(logits, rows * Z + i * K, inside))
                step = g * (1 - t * t)
            dz += tl.where(column, (tl.load(scale).to(tl.float32) * step)[:, None], 0.0)
        tl.store(g_pre + rows * N + i, g, mask=inside)
    if NORM != "none":
        rstd = tl.load(rstds + at, mask=known, other=0.0)
        back = rstd * rstd * dz * z / (C * N if NORM == "all" else C)
        dz *= rstd
        tl.store(g_z + at, dz, mask=known)
        dz = dz.to(dtype)
        for i in range(N):
            for first in range(0, C, BLOCK):
                c = first + tl.arange(0, BLOCK)
                mask = inside[:, None] & (c < C)[None, :]
                through = tl.dot(dz, _phi(phi, k, c, i, Z, K, C, N, NORM), input_precision="ieee")
                tl.store(g_streams + rows[:, None] * (N * C) + i * C + c[None, :], through.to(dtype), mask=mask)
            shrink = tl.sum(tl.where(_belongs(k, i, K, NORM)[None, :], back, 0.0), 1)
            tl.store(g_post + rows * N + i, shrink, mask=inside)
        tl.debug_barrier()

    s = tl.arange(0, SQUARE)
    sums = tl.zeros([TOKENS, SQUARE], tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        mask = inside[:, None] & (c < C)[None, :]
        y = _tile(update, rows[:, None] * C + c[None, :], mask)
        h = _tile(g_hidden, rows[:, None] * C + c[None, :], mask)
        x, dx = _streams(streams, rows, c, mask, C, N), ()
        for _ in tl.static_range(N):
            dx = dx + (tl.zeros([TOKENS, BLOCK], tl.float32),)
        dy = tl.zeros([TOKENS, BLOCK], tl.float32)
        for i in range(N):
            G = _tile(weights, rows * N + i, inside)[:, None] * h
            if HAS_AFTER:
                G += _tile(g_after, rows[:, None] * (N * C) + i * C + c[None, :], mask)
            if NORM != "none":
                G += _tile(g_streams, rows[:, None] * (N * C) + i * C + c[None, :], mask)
                shrink = _tile(g_post, rows * N + i, inside)
                G -= shrink[:, None] * _mixed(x, y, mix, post, i, inside, N, dtype).to(tl.float32)
            dy += _tile(post, i, inside)[:, None] * G
            sums += tl.where((s == N * N + i)[None, :], tl.sum(G * y, 1)[:, None], 0.0)
            for j in tl.static_range(N):
                dx = _replaced(dx, j, dx[j] + _tile(mix, i * N + j, inside)[:, None] * G, N)
                sums += tl.where((s == i * N + j)[None, :], tl.sum(G * x[j], 1)[:, None], 0.0)
        tl.store(g_update + rows[:, None] * C + c[None, :], dy.to(dtype), mask=mask)
        tl.debug_barrier()
        for j in tl.static_range(N):
            tl.store(g_streams + rows[:, None] * (N * C) + j * C + c[None, :], dx[j].to(dtype), mask=mask)
    tl.debug_barrier()
    to_mix, to_post = s < N * N, (s >= N * N) & (s < N * N + N)
    tl.store(g_mix + rows[:, None] * (N * N) + s[None, :], sums, mask=inside[:, None] & to_mix[None, :])
    tl.store(g_post + rows[:, None] * N + s[None, :] - N * N, sums, mask=inside[:, None] & to_post[None, :])
