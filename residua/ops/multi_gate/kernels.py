"""Multi-Gate Residuals on the GPU: one read and one write of the streams per junction, forward and backward.

Forward: ‖s'‖² and w2·s' follow from dot products of s and f, so the 4n + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f;
‖f‖², w2·f} of one reduction give β and a, and one more sweep over the tiles on chip writes s' and h. The scalars are
kept for the backward pass, which needs 3n + 1 more (g_s'_i·f, g_s'_i·s_i, g_h·s_i; g_h·f) and no second reduction.

A row of any width is cut into TILES tiles of BLOCK channels, so that 1280 costs five tiles of 256 and not 2048. A tile
of all streams is [ROWS, BLOCK], ROWS being N rounded up to a power of two.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _lerp(s, f, beta):
    """s + β(f − s), always with the same two roundings: a repeated junction must give the same streams."""
    return tl.fma(beta, f - s, s)


@triton.jit
def _row(x, row, c, inside):
    """Channels c of a row, in float32."""
    return tl.load(x + row + c, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gates(z, bias, i, live, COMPETITIVE: tl.constexpr):
    """β from the scores; rows that are only padding get 0."""
    if COMPETITIVE:
        forget = tl.load(bias).to(tl.float32)
        z = tl.where(live, z + tl.load(bias + 1 + i, mask=live, other=0.0).to(tl.float32), -float("inf"))
        top = tl.maximum(tl.max(z, 0), forget)
        e = tl.exp(z - top)
        return e * (1 / (tl.sum(e, 0) + tl.exp(forget - top)))
    return tl.where(live, tl.sigmoid(z + tl.load(bias + i, mask=live, other=0.0).to(tl.float32)), 0.0)


@triton.jit
def _pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root):
    """w2·s', 1/rms(s') and a, from the scalars of s and f."""
    keep = 1 - beta
    norm = keep * keep * ss + 2 * beta * keep * sf + beta * beta * ff
    rstd = tl.rsqrt(tl.maximum(norm, 0.0) * per_width + eps)
    after2 = keep * s2 + beta * f2
    z = tl.where(live, after2 * rstd * per_root, -float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    return after2, rstd, e * (1 / tl.sum(e, 0))


@triton.jit
def forward_kernel(
    streams,
    update,
    gate_query,
    gate_bias,
    pool_query,
    hidden,
    after,
    stats,
    eps,
    per_width,
    per_root,
    C: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    COMPETITIVE: tl.constexpr,
):
    """One token; ROWS is N rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    here = token * N * C + i[:, None] * C

    s, f = (), ()
    ss, sf = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    s1, s2 = ss, sf
    ff, f2 = tl.zeros([1, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        s = s + (_row(streams, here, c, live[:, None] & (c < C)),)
        f = f + (_row(update, token * C, c, c < C),)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        w1, w2 = _row(gate_query, 0, c, c < C), _row(pool_query, 0, c, c < C)
        ss, sf, s1, s2 = ss + s[k] * s[k], sf + s[k] * f[k], s1 + s[k] * w1, s2 + s[k] * w2
        ff, f2 = ff + f[k] * f[k], f2 + f[k] * w2
    ss, sf, s1, s2 = tl.reduce((ss, sf, s1, s2), 1, _add4)
    ff, f2 = tl.reduce((ff, f2), 1, _add2)
    beta = _gates(s1 * tl.rsqrt(ss * per_width + eps) * per_root, gate_bias, i, live, COMPETITIVE)
    _, _, a = _pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)

    row = stats + token * (5 * N + 2)
    tl.store(row + i, beta, mask=live)
    tl.store(row + N + i, ss, mask=live)
    tl.store(row + 2 * N + i, sf, mask=live)
    tl.store(row + 3 * N + i, s1, mask=live)
    tl.store(row + 4 * N + i, s2, mask=live)
    tl.store(row + 5 * N + tl.arange(0, 1), ff)
    tl.store(row + 5 * N + 1 + tl.arange(0, 1), f2)

    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        new = _lerp(s[k], f[k], beta[:, None])
        h = tl.sum(a[:, None] * new, 0)[None, :]
        tl.store(after + here + c, new.to(after.dtype.element_ty), mask=live[:, None] & (c < C))
        tl.store(hidden + token * C + c, h.to(hidden.dtype.element_ty), mask=c < C)


@triton.jit
def backward_kernel(
    g_hidden,
    g_after,
    start,
    past_updates,
    past_stats,
    update,
    gate_query,
    pool_query,
    stats,
    g_streams,
    g_update,
    partial,
    tokens,
    eps,
    per_width,
    per_root,
    C: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_G_AFTER: tl.constexpr,
    COMPETITIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Every P-th token, P the number of programs. Letters as in the closed form of the gradients:

    A = dq·r'/√C,  B = −dq·(w2·s')·r'³/(C√C),  G = g_s' + a·g_h + A·w2 + B·s'
    g_f = Σ β·G,   g_s = (1−β)·G + D·w1 + E·s,   D = dz·r/√C,  E = −dz·(w1·s)·r³/(C√C)

    The gradients of w1, w2 and the biases add up in registers; each program writes one row of `partial`.
    """
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    g_w1, g_w2 = (), ()
    for _ in tl.static_range(TILES):
        g_w1, g_w2 = g_w1 + (tl.zeros([1, BLOCK], tl.float32),), g_w2 + (tl.zeros([1, BLOCK], tl.float32),)
    g_bias, g_forget = tl.zeros([ROWS], tl.float32), 0.0

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0)), num_stages=STAGES):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        here = token * N * C + i[:, None] * C

        s, f, g, h = (), (), (), ()
        for k in tl.static_range(TILES):
            c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
            x = _row(start, here, c, live[:, None] & (c < C))
            for d in tl.static_range(DEPTH):
                past = tl.load(past_stats[d] + token * (5 * N + 2) + i, mask=live, other=0.0)[:, None]
                x = _lerp(x, _row(past_updates[d], token * C, c, c < C), past)
                x = x.to(start.dtype.element_ty).to(tl.float32)
            s = s + (x,)
            f, h = f + (_row(update, token * C, c, c < C),), h + (_row(g_hidden, token * C, c, c < C),)
            if HAS_G_AFTER:
                g = g + (_row(g_after, here, c, live[:, None] & (c < C)),)
        hf = tl.zeros([1, BLOCK], tl.float32)
        hs = tl.zeros([ROWS, BLOCK], tl.float32)
        gf, gs = hs, hs
        for k in tl.static_range(TILES):
            hf, hs = hf + h[k] * f[k], hs + h[k] * s[k]
            if HAS_G_AFTER:
                gf, gs = gf + g[k] * f[k], gs + g[k] * s[k]
        hf = tl.sum(hf, 1)
        hs, gf, gs = tl.reduce((hs, gf, gs), 1, _add3)

        row = stats + token * (5 * N + 2)
        beta = tl.load(row + i, mask=live, other=0.0)
        ss = tl.load(row + N + i, mask=live, other=0.0)
        sf = tl.load(row + 2 * N + i, mask=live, other=0.0)
        s1 = tl.load(row + 3 * N + i, mask=live, other=0.0)
        s2 = tl.load(row + 4 * N + i, mask=live, other=0.0)
        ff, f2 = tl.load(row + 5 * N), tl.load(row + 5 * N + 1)
        keep = 1 - beta
        after2, rstd, a = _pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
        ht = keep * hs + beta * hf
        A = a * (ht - tl.sum(a * ht, 0)) * rstd * per_root
        B = -A * after2 * rstd * rstd * per_width
        d_beta = gf - gs + a * (hf - hs) + A * (f2 - s2) + B * ((1 - 2 * beta) * sf + beta * ff - keep * ss)
        if COMPETITIVE:
            taken = tl.sum(beta * d_beta, 0)
            dz = beta * (d_beta - taken)
            g_forget -= (1 - tl.sum(beta, 0)) * taken
        else:
            dz = beta * keep * d_beta
        g_bias += dz
        r = tl.rsqrt(ss * per_width + eps)
        D = dz * r * per_root
        E = -D * s1 * r * r * per_width

        # With s' = (1−β)s + βf, the parts of g_f and of w2's gradient that f, g_h and w2 share come out of the sums.
        of_h, of_w2, of_f = tl.sum(beta * a, 0), tl.sum(beta * A, 0), tl.sum(beta * beta * B, 0)
        b_s, b_f, a_s = (B * keep)[:, None], (B * beta)[:, None], (A * keep)[:, None]
        new_w1, new_w2 = (), ()
        for k in tl.static_range(TILES):
            c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
            w1, w2 = _row(gate_query, 0, c, c < C), _row(pool_query, 0, c, c < C)
            own = b_s * s[k]
            if HAS_G_AFTER:
                own += g[k]
            g_f = tl.sum(beta[:, None] * own, 0)[None, :] + of_h * h[k] + of_w2 * w2 + of_f * f[k]
            G = own + a[:, None] * h[k]
            G += A[:, None] * w2
            G += b_f * f[k]
            g_s = keep[:, None] * G + D[:, None] * w1
            g_s += E[:, None] * s[k]
            tl.store(g_streams + here + c, g_s.to(g_streams.dtype.element_ty), mask=live[:, None] & (c < C))
            tl.store(g_update + token * C + c, g_f.to(g_update.dtype.element_ty), mask=c < C)
            new_w1 = new_w1 + (g_w1[k] + tl.sum(D[:, None] * s[k], 0)[None, :],)
            new_w2 = new_w2 + (g_w2[k] + tl.sum(a_s * s[k], 0)[None, :] + of_w2 * f[k],)
        g_w1, g_w2 = new_w1, new_w2

    row = partial + program * (2 * C + N + 1)
    for k in tl.static_range(TILES):
        c = k * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(row + c, g_w1[k], mask=c < C)
        tl.store(row + C + c, g_w2[k], mask=c < C)
    tl.store(row + 2 * C, g_forget)
    tl.store(row + 2 * C + 1 + i, g_bias, mask=live)
