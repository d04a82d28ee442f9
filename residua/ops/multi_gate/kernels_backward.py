"""Multi-Gate Residuals on the GPU, backward: `kernels.py` has the letters and what bounds these kernels."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import add3
from residua.ops.multi_gate.kernels import (
    fold,
    kept_scalars,
    lerp,
    pick,
    pool_weights,
    pooling,
    put,
    rounded,
    row,
    scalars,
    stream,
    vector,
)


@triton.jit
def past_gates(stats_ptrs, token, i, N: tl.constexpr):
    """β [ROWS] of each junction since the start of the segment."""
    betas = ()
    for d in tl.static_range(len(stats_ptrs)):
        betas = betas + (scalars(stats_ptrs[d] + token * (5 * N + 2), i, N),)
    return betas


@triton.jit
def with_each(sums, b_x, i, N: tl.constexpr):
    """N sums, and to each its entry of x [ROWS] added."""
    new = ()
    for k in tl.static_range(N):
        new = new + (sums[k] + pick(b_x, i, k),)
    return new


@triton.jit
def again(
    start_ptrs, b_updates, betas, i, k: tl.constexpr, token, c, C: tl.constexpr, N: tl.constexpr, POLICY: tl.constexpr
):
    """Stream k before this junction [1, BLOCK]: as at the start of the segment, and the junctions since repeated."""
    b_s = row(stream(start_ptrs, k, token, C, N), c, C, POLICY)
    for d in tl.static_range(len(b_updates)):
        b_s = rounded(lerp(b_s, b_updates[d], pick(betas[d], i, k)), start_ptrs[0].dtype.element_ty)
    return b_s


@triton.jit
def rows(x_ptrs, token, c, C: tl.constexpr, POLICY: tl.constexpr):
    b_rows = ()
    for d in tl.static_range(len(x_ptrs)):
        b_rows = b_rows + (row(x_ptrs[d] + token * C, c, C, POLICY),)
    return b_rows


@triton.jit
def through_scores(
    beta, ss, sf, s1, s2, ff, f2, after2, rstd, a, hs, hf, gf, gs, eps, per_width, per_root, COMPETITIVE: tl.constexpr
):
    """A, B, dz, D and E [ROWS] of the closed form (`backward_kernel`), and −1 times the forget bias's gradient.

    `after2`, `rstd` and `a` are what `pooling` returns; hs = g_h·s, hf = g_h·f, gs = g_s'·s, gf = g_s'·f.
    """
    keep = 1 - beta
    # A and B: the gradient through the pool's scores q
    ht = keep * hs + beta * hf
    A = a * (ht - tl.sum(a * ht, 0)) * rstd * per_root
    B = -A * after2 * rstd * rstd * per_width
    # dβ = G·(f − s), and dz: the gradient through the gates' scores
    d_beta = gf - gs + a * (hf - hs) + A * (f2 - s2) + B * ((1 - 2 * beta) * sf + beta * ff - keep * ss)
    taken = tl.sum(beta * d_beta, 0)
    dz = beta * (d_beta - taken) if COMPETITIVE else beta * keep * d_beta
    # D and E: what dz adds to g_s
    r = tl.rsqrt(ss * per_width + eps)
    D = dz * r * per_root
    E = -D * s1 * r * r * per_width
    return A, B, dz, D, E, (1 - tl.sum(beta, 0)) * taken


@triton.jit
def zero_tiles(BLOCK: tl.constexpr, TILES: tl.constexpr):
    b_tiles = ()
    for _ in tl.static_range(TILES):
        b_tiles = b_tiles + (tl.zeros([1, BLOCK], tl.float32),)
    return b_tiles


@triton.jit
def backward_kernel(
    g_h_ptr, g_after_ptrs, start_ptrs, past_f_ptrs, past_stats_ptrs, f_ptr, w1_ptr, w2_ptr, gain_ptr, stats_ptr,
    h_stats_ptr, g_s_ptrs, g_f_ptr, partial_ptr, tokens, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, COMPETITIVE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Every P-th token, P the number of programs. Letters as in the closed form of the gradients:

        A = dq·r'/√C,  B = −dq·(w2·s')·r'³/(C√C),  G = g_s' + a·g_h + A·w2 + B·s'
        g_f = Σ β·G,   g_s = (1−β)·G + D·w1 + E·s,   D = dz·r/√C,  E = −dz·(w1·s)·r³/(C√C)

    The gradients of w1, w2 and the biases are summed in registers; each program writes one row of `partial`.
    NORMED: from the gradient of x in the place of h's; a row of `partial` ends with the gradient of the gain.
    """
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    b_g_w1, b_g_w2 = zero_tiles(BLOCK, TILES), zero_tiles(BLOCK, TILES)
    b_g_gain = zero_tiles(BLOCK, TILES if NORMED else 0)
    g_bias, g_forget = (), 0.0
    for _ in tl.static_range(N):
        g_bias = g_bias + (0.0,)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        beta, ss, sf, s1, s2, ff, f2 = kept_scalars(stats_ptr, token, i, N)
        betas = past_gates(past_stats_ptrs, token, i, N)

        # first sweep: the dot products g_h·f, g_h·s (or u·f, u·s), g_s'·f and g_s'·s
        hf = tl.zeros([1, LANES], tl.float32)
        hs = tl.zeros([ROWS, LANES], tl.float32)
        gf, gs = hs, hs
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f, b_g_h = row(f_ptr + token * C, c, C, "evict_last"), row(g_h_ptr + token * C, c, C, "evict_last")
            if NORMED:
                b_g_h *= vector(gain_ptr, c, C)
            b_past = rows(past_f_ptrs, token, c, C, "evict_last")
            hf += fold(b_g_h * b_f, LANES)
            for k in tl.static_range(N):
                b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_last")
                hs = put(hs, i, k, fold(b_g_h * b_s, LANES))
                if len(g_after_ptrs) > 0:
                    b_g = row(stream(g_after_ptrs, k, token, C, N), c, C, "evict_last")
                    gf, gs = put(gf, i, k, fold(b_g * b_f, LANES)), put(gs, i, k, fold(b_g * b_s, LANES))
        hf = tl.sum(tl.sum(hf, 1), 0)
        hs, gf, gs = tl.reduce((hs, gf, gs), 1, add3)  # each [ROWS]

        keep = 1 - beta
        after2, rstd, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
        in_s, in_f = a * keep, tl.sum(a * beta, 0)
        if NORMED:
            # p, then g_h·s and g_h·f
            norm_ptr = h_stats_ptr + token * (N + 2)
            of_norm = tl.load(norm_ptr + N + 1)
            pull = (tl.sum(in_s * hs, 0) + in_f * hf) * of_norm * of_norm * of_norm * per_width
            hs = of_norm * hs - pull * scalars(norm_ptr, i, N)
            hf = of_norm * hf - pull * tl.load(norm_ptr + N)
        A, B, dz, D, E, forgotten = through_scores(
            beta, ss, sf, s1, s2, ff, f2, after2, rstd, a, hs, hf, gf, gs, eps, per_width, per_root, COMPETITIVE
        )
        if COMPETITIVE:
            g_forget -= forgotten
        g_bias = with_each(g_bias, dz, i, N)

        # With s' = (1−β)s + βf, the parts of g_f and of w2's gradient in f, g_h and w2 are factored out of the sums;
        # g_s is a sum of s, g_s', g_h, f, w1 and w2 with one factor each. That of g_h is in_f in g_f, and in_s in g_s.
        of_w2, of_f = tl.sum(beta * A, 0), tl.sum(beta * beta * B, 0)
        by_s, by_w2, by_f = keep * keep * B + E, keep * A, keep * beta * B
        # second sweep: g_f, g_s, and the sums over tokens for w1, w2 and the gain; if NORMED, h and g_h first
        b_new_w1, b_new_w2, b_new_gain = (), (), ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f, b_g_h = row(f_ptr + token * C, c, C, "evict_first"), row(g_h_ptr + token * C, c, C, "evict_first")
            b_past = rows(past_f_ptrs, token, c, C, "evict_first")
            if NORMED:
                b_h, b_streams = in_f * b_f, ()
                for k in tl.static_range(N):
                    b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_first")
                    b_h += pick(in_s, i, k) * b_s
                    b_streams = b_streams + (b_s,)
                b_g_h = of_norm * b_g_h
                b_new_gain = b_new_gain + (b_g_gain[tile] + b_g_h * b_h,)
                b_g_h = b_g_h * vector(gain_ptr, c, C) - pull * b_h
            b_w1, b_w2 = vector(w1_ptr, c, C), vector(w2_ptr, c, C)
            b_g_f = in_f * b_g_h + of_w2 * b_w2 + of_f * b_f
            b_to_w1, b_to_w2 = b_g_w1[tile], b_g_w2[tile] + of_w2 * b_f
            for k in tl.static_range(N):
                if NORMED:
                    b_s = b_streams[k]
                else:
                    b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_first")
                b_g_f += pick(by_f, i, k) * b_s
                b_to_w1 += pick(D, i, k) * b_s
                b_to_w2 += pick(by_w2, i, k) * b_s
                b_g_s = pick(by_s, i, k) * b_s + pick(in_s, i, k) * b_g_h
                b_g_s += pick(by_w2, i, k) * b_w2
                b_g_s += pick(by_f, i, k) * b_f
                b_g_s += pick(D, i, k) * b_w1
                if len(g_after_ptrs) > 0:
                    b_g = row(stream(g_after_ptrs, k, token, C, N), c, C, "evict_first")
                    b_g_f += pick(beta, i, k) * b_g
                    b_g_s += pick(keep, i, k) * b_g
                tl.store(stream(g_s_ptrs, k, token, C, N) + c, b_g_s.to(start_ptrs[0].dtype.element_ty), mask=c < C)
            tl.store(g_f_ptr + token * C + c, b_g_f.to(g_f_ptr.dtype.element_ty), mask=c < C)
            b_new_w1, b_new_w2 = b_new_w1 + (b_to_w1,), b_new_w2 + (b_to_w2,)
        b_g_w1, b_g_w2, b_g_gain = b_new_w1, b_new_w2, b_new_gain

    # this program's row of `partial`: w1, w2, the forget bias, the biases, the gain
    line_ptr = partial_ptr + program * ((3 if NORMED else 2) * C + N + 1)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(line_ptr + c, b_g_w1[tile], mask=c < C)
        tl.store(line_ptr + C + c, b_g_w2[tile], mask=c < C)
        if NORMED:
            tl.store(line_ptr + 2 * C + N + 1 + c, b_g_gain[tile], mask=c < C)
    tl.store(line_ptr + 2 * C, g_forget)
    for k in tl.static_range(N):
        tl.store(line_ptr + 2 * C + 1 + k, g_bias[k])


@triton.jit
def pool_backward_kernel(
    g_h_ptr, g_after_ptrs, s_ptrs, w2_ptr, stats_ptr, g_s_ptrs, partial_ptr, tokens, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Every P-th token. g_s = g_s' + a·g_h + A·w2 + B·s with A and B as in `backward_kernel`, s' being s.

    A stream's gradient passes through every read of it, and each adds its own part: no other pass sums gradients.
    """
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    b_g_w2 = zero_tiles(BLOCK, TILES)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        line_ptr = stats_ptr + token * 2 * N
        ss, s2 = scalars(line_ptr, i, N), scalars(line_ptr + N, i, N)
        # first sweep: g_h·s_i
        hs = tl.zeros([ROWS, LANES], tl.float32)
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_g_h = row(g_h_ptr + token * C, c, C, "evict_last")
            for k in tl.static_range(N):
                hs = put(hs, i, k, fold(b_g_h * row(stream(s_ptrs, k, token, C, N), c, C, "evict_last"), LANES))
        hs = tl.sum(hs, 1)
        # a, A and B: the gradient through the scores
        rstd, a = pool_weights(ss, s2, live, eps, per_width, per_root)
        A = a * (hs - tl.sum(a * hs, 0)) * rstd * per_root
        B = -A * s2 * rstd * rstd * per_width

        # second sweep: g_s, and w2's sum over tokens
        b_new_w2 = ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_g_h, b_w2, b_to_w2 = row(g_h_ptr + token * C, c, C, "evict_first"), vector(w2_ptr, c, C), b_g_w2[tile]
            for k in tl.static_range(N):
                b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
                b_to_w2 += pick(A, i, k) * b_s
                b_g_s = pick(B, i, k) * b_s + pick(a, i, k) * b_g_h
                b_g_s += pick(A, i, k) * b_w2
                if len(g_after_ptrs) > 0:
                    b_g_s += row(stream(g_after_ptrs, k, token, C, N), c, C, "evict_first")
                tl.store(stream(g_s_ptrs, k, token, C, N) + c, b_g_s.to(g_s_ptrs[0].dtype.element_ty), mask=c < C)
            b_new_w2 = b_new_w2 + (b_to_w2,)
        b_g_w2 = b_new_w2

    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(partial_ptr + program * C + c, b_g_w2[tile], mask=c < C)
