"""Multi-Gate Residuals on the GPU: one read and one write of the streams per junction, forward and backward.

Forward: ‖s'‖² and w2·s' follow from dot products of s and f, so the 4n + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f;
‖f‖², w2·f} of one sweep over the channels give β and a, and a second sweep writes s' and h. The scalars are kept for
the backward pass, which needs 3n + 1 more (g_s'_i·f, g_s'_i·s_i, g_h·s_i; g_h·f) and no second reduction.

What bounds these kernels is registers: they decide how many tokens are on their way at once. So nothing is held from
one sweep to the next. The second sweep reads again what the first left in L1 or L2, and sums over channels are taken
inside a thread first, so that they are one number per thread and stream.

A row of any width is cut into TILES tiles of BLOCK channels, so that 1280 costs five tiles of 256 and not 2048; the
streams of a tile are taken one after another. LANES is the number of threads. Scalars of all streams are [ROWS], ROWS
being N rounded up to a power of two. Streams come as one tensor [M, N, C], or as N tensors [M, C] while they are still
the outputs of single sublayers.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.multi_gate.kernels_tile import add2, add3, add4, fold, pick, put, rounded, row, scalars, stream, vector


@triton.jit
def _lerp(s, f, beta):
    """s + β(f − s), always with the same two roundings: a repeated junction must give the same streams."""
    return tl.fma(beta, f - s, s)


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
    LANES: tl.constexpr,
    COMPETITIVE: tl.constexpr,
):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    mine = update + token * C

    ss, sf = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    s1, s2 = ss, sf
    ff, f2 = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        f, w1, w2 = row(mine, c, C, "evict_last"), vector(gate_query, c, C), vector(pool_query, c, C)
        for k in tl.static_range(N):
            s = row(stream(streams, k, token, C, N), c, C, "evict_last")
            ss, sf = put(ss, i, k, fold(s * s, LANES)), put(sf, i, k, fold(s * f, LANES))
            s1, s2 = put(s1, i, k, fold(s * w1, LANES)), put(s2, i, k, fold(s * w2, LANES))
        ff, f2 = ff + fold(f * f, LANES), f2 + fold(f * w2, LANES)
    ss, sf, s1, s2 = tl.reduce((ss, sf, s1, s2), 1, add4)
    ff, f2 = tl.reduce((ff, f2), 1, add2)
    beta = _gates(s1 * tl.rsqrt(ss * per_width + eps) * per_root, gate_bias, i, live, COMPETITIVE)
    _, _, a = _pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)

    line = stats + token * (5 * N + 2)
    tl.store(line + i, beta, mask=live)
    tl.store(line + N + i, ss, mask=live)
    tl.store(line + 2 * N + i, sf, mask=live)
    tl.store(line + 3 * N + i, s1, mask=live)
    tl.store(line + 4 * N + i, s2, mask=live)
    tl.store(line + 5 * N + tl.arange(0, 1), ff)
    tl.store(line + 5 * N + 1 + tl.arange(0, 1), f2)

    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        f = row(mine, c, C, "evict_first")
        h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            s = row(stream(streams, k, token, C, N), c, C, "evict_first")
            s = _lerp(s, f, pick(beta, i, k))
            h += pick(a, i, k) * s
            tl.store(after + (token * N + k) * C + c, s.to(after.dtype.element_ty), mask=c < C)
        tl.store(hidden + token * C + c, h.to(hidden.dtype.element_ty), mask=c < C)


@triton.jit
def invert_kernel(
    after,
    update,
    stats,
    streams,
    floor,
    C: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
):
    """One token's streams before a junction, from those after it: s = (s' − βf)/(1 − β)."""
    token = tl.program_id(0).to(tl.int64)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        f = row(update + token * C, c, C, "evict_first")
        for k in tl.static_range(N):
            beta = tl.load(stats + token * (5 * N + 2) + k)
            s = row(after + (token * N + k) * C, c, C, "evict_first")
            s = (s - beta * f) / tl.maximum(1 - beta, floor)
            tl.store(streams + (token * N + k) * C + c, s.to(streams.dtype.element_ty), mask=c < C)


@triton.jit
def _again(start, updates, betas, i, k: tl.constexpr, token, c, C: tl.constexpr, N: tl.constexpr, POLICY: tl.constexpr):
    """Stream k before this junction: as it was at the start of the segment, and the junctions since, repeated."""
    s = row(stream(start, k, token, C, N), c, C, POLICY)
    for d in tl.static_range(len(updates)):
        s = rounded(_lerp(s, updates[d], pick(betas[d], i, k)), start[0].dtype.element_ty)
    return s


@triton.jit
def _rows(tensors, token, c, C: tl.constexpr, POLICY: tl.constexpr):
    out = ()
    for d in tl.static_range(len(tensors)):
        out = out + (row(tensors[d] + token * C, c, C, POLICY),)
    return out


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
    LANES: tl.constexpr,
    COMPETITIVE: tl.constexpr,
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
    g_bias, g_forget = (), 0.0
    for _ in tl.static_range(N):
        g_bias = g_bias + (0.0,)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        line = stats + token * (5 * N + 2)
        beta, ss, sf = scalars(line, i, N), scalars(line + N, i, N), scalars(line + 2 * N, i, N)
        s1, s2 = scalars(line + 3 * N, i, N), scalars(line + 4 * N, i, N)
        ff, f2 = tl.load(line + 5 * N), tl.load(line + 5 * N + 1)
        betas = ()
        for d in tl.static_range(len(past_stats)):
            betas = betas + (scalars(past_stats[d] + token * (5 * N + 2), i, N),)

        hf = tl.zeros([1, LANES], tl.float32)
        hs = tl.zeros([ROWS, LANES], tl.float32)
        gf, gs = hs, hs
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            f, h = row(update + token * C, c, C, "evict_last"), row(g_hidden + token * C, c, C, "evict_last")
            past = _rows(past_updates, token, c, C, "evict_last")
            hf += fold(h * f, LANES)
            for k in tl.static_range(N):
                s = _again(start, past, betas, i, k, token, c, C, N, "evict_last")
                hs = put(hs, i, k, fold(h * s, LANES))
                if len(g_after) > 0:
                    g = row(stream(g_after, k, token, C, N), c, C, "evict_last")
                    gf, gs = put(gf, i, k, fold(g * f, LANES)), put(gs, i, k, fold(g * s, LANES))
        hf = tl.sum(hf, 1)
        hs, gf, gs = tl.reduce((hs, gf, gs), 1, add3)

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
        new_bias = ()
        for k in tl.static_range(N):
            new_bias = new_bias + (g_bias[k] + pick(dz, i, k),)
        g_bias = new_bias
        r = tl.rsqrt(ss * per_width + eps)
        D = dz * r * per_root
        E = -D * s1 * r * r * per_width

        # With s' = (1−β)s + βf, the parts of g_f and of w2's gradient that f, g_h and w2 share come out of the sums,
        # and g_s is a sum of s, g_s', g_h, f, w1 and w2 with one factor each.
        of_h, of_w2, of_f = tl.sum(beta * a, 0), tl.sum(beta * A, 0), tl.sum(beta * beta * B, 0)
        by_s, by_h, by_w2, by_f = keep * keep * B + E, keep * a, keep * A, keep * beta * B
        new_w1, new_w2 = (), ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            w1, w2 = vector(gate_query, c, C), vector(pool_query, c, C)
            f, h = row(update + token * C, c, C, "evict_first"), row(g_hidden + token * C, c, C, "evict_first")
            past = _rows(past_updates, token, c, C, "evict_first")
            g_f = of_h * h + of_w2 * w2 + of_f * f
            to_w1, to_w2 = g_w1[tile], g_w2[tile] + of_w2 * f
            for k in tl.static_range(N):
                s = _again(start, past, betas, i, k, token, c, C, N, "evict_first")
                g_f += pick(by_f, i, k) * s
                to_w1 += pick(D, i, k) * s
                to_w2 += pick(by_w2, i, k) * s
                g_s = pick(by_s, i, k) * s + pick(by_h, i, k) * h
                g_s += pick(by_w2, i, k) * w2
                g_s += pick(by_f, i, k) * f
                g_s += pick(D, i, k) * w1
                if len(g_after) > 0:
                    g = row(stream(g_after, k, token, C, N), c, C, "evict_first")
                    g_f += pick(beta, i, k) * g
                    g_s += pick(keep, i, k) * g
                tl.store(stream(g_streams, k, token, C, N) + c, g_s.to(start[0].dtype.element_ty), mask=c < C)
            tl.store(g_update + token * C + c, g_f.to(g_update.dtype.element_ty), mask=c < C)
            new_w1, new_w2 = new_w1 + (to_w1,), new_w2 + (to_w2,)
        g_w1, g_w2 = new_w1, new_w2

    line = partial + program * (2 * C + N + 1)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(line + c, g_w1[tile], mask=c < C)
        tl.store(line + C + c, g_w2[tile], mask=c < C)
    tl.store(line + 2 * C, g_forget)
    for k in tl.static_range(N):
        tl.store(line + 2 * C + 1 + k, g_bias[k])
