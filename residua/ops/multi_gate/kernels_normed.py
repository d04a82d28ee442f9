"""Multi-Gate Residuals with the norm of the next sublayer inside: h is neither written nor read.

A file of its own: the kernels of `kernels.py` for junctions whose h only a norm reads. With x = gain ⊙ h·r the norm's
output, r = 1/rms(h), and u = gain ⊙ g_x,

    g_h = r·u − p·h,   p = r³/C · u·h,   g_gain = Σ g_x ⊙ h·r

h = Σ a_i(1−β_i)·s_i + (Σ a_i β_i)·f is made again from rows that the backward pass reads anyway. The dot products
g_h·s_i and g_h·f that it needs follow from u·s_i, u·f and, kept by the forward pass, h·s_i and h·f: still one
reduction. So a junction moves 2n + 2 rows forward and 3n + 3 backward, where beside a norm it is 2n + 4 and 3n + 6.

Letters as in `kernels.py`; in_s and in_f are the factors of s and f in h.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.multi_gate.kernels import (
    again,
    dots,
    gates,
    keep_scalars,
    kept_scalars,
    lerp,
    past_gates,
    pooling,
    rows,
    through_scores,
    with_each,
)
from residua.ops.multi_gate.kernels_tile import add2, add3, fold, pick, put, row, scalars, stream, vector


@triton.jit
def normed_forward_kernel(
    s_ptrs, f_ptr, w1_ptr, bias_ptr, w2_ptr, gain_ptr, normed_ptr, after_ptr, stats_ptr, h_stats_ptr,
    norm_eps, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, COMPETITIVE: tl.constexpr,
):  # fmt: skip
    """One token; h stays in registers until its norm is known."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    row_ptr = f_ptr + token * C

    ss, sf, s1, s2, ff, f2 = dots(s_ptrs, row_ptr, w1_ptr, w2_ptr, token, i, C, N, ROWS, BLOCK, TILES, LANES)
    # β from w1 · RMS(s), then a from w2 · RMS(s')
    beta = gates(s1 * tl.rsqrt(ss * per_width + eps) * per_root, bias_ptr, i, live, COMPETITIVE)
    _, _, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
    keep_scalars(stats_ptr, token, i, live, beta, ss, sf, s1, s2, ff, f2, N)

    # second sweep: s' = s + β(f − s), h = Σ a s', and the dot products h·h, h·f and h·s
    b_hidden = ()
    hh, hf = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
    hs = tl.zeros([ROWS, LANES], tl.float32)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_f = row(row_ptr, c, C, "evict_first")
        b_h = tl.zeros([1, BLOCK], tl.float32)
        b_streams = ()
        for k in tl.static_range(N):
            b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
            b_streams = b_streams + (b_s,)
            b_s = lerp(b_s, b_f, pick(beta, i, k))
            b_h += pick(a, i, k) * b_s
            tl.store(after_ptr + (token * N + k) * C + c, b_s.to(after_ptr.dtype.element_ty), mask=c < C)
        hh, hf = hh + fold(b_h * b_h, LANES), hf + fold(b_h * b_f, LANES)
        for k in tl.static_range(N):
            hs = put(hs, i, k, fold(b_h * b_streams[k], LANES))
        b_hidden = b_hidden + (b_h,)
    hh, hf = tl.reduce((hh, hf), 1, add2)  # each [1]
    rstd = tl.rsqrt(hh * per_width + norm_eps)
    # keep h·s, h·f and r for the backward pass
    line_ptr = h_stats_ptr + token * (N + 2)
    tl.store(line_ptr + i, tl.sum(hs, 1), mask=live)
    tl.store(line_ptr + N + tl.arange(0, 1), hf)
    tl.store(line_ptr + N + 1 + tl.arange(0, 1), rstd)

    # x = gain ⊙ h·r
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_normed = b_hidden[tile] * rstd * vector(gain_ptr, c, C)
        tl.store(normed_ptr + token * C + c, b_normed.to(normed_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def normed_backward_kernel(
    g_x_ptr, g_after_ptrs, start_ptrs, past_f_ptrs, past_stats_ptrs, f_ptr, w1_ptr, w2_ptr, gain_ptr, stats_ptr,
    h_stats_ptr, g_s_ptrs, g_f_ptr, partial_ptr, tokens, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, COMPETITIVE: tl.constexpr,
):  # fmt: skip
    """Every P-th token, P the number of programs, as in `backward_kernel`; in `partial` a row ends with the gain."""
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    b_g_w1, b_g_w2, b_g_gain = (), (), ()
    for _ in tl.static_range(TILES):
        b_g_w1, b_g_w2 = b_g_w1 + (tl.zeros([1, BLOCK], tl.float32),), b_g_w2 + (tl.zeros([1, BLOCK], tl.float32),)
        b_g_gain = b_g_gain + (tl.zeros([1, BLOCK], tl.float32),)
    g_bias, g_forget = (), 0.0
    for _ in tl.static_range(N):
        g_bias = g_bias + (0.0,)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        beta, ss, sf, s1, s2, ff, f2 = kept_scalars(stats_ptr, token, i, N)
        betas = past_gates(past_stats_ptrs, token, i, N)

        # first sweep: the dot products u·f, u·s, g_s'·f and g_s'·s
        uf = tl.zeros([1, LANES], tl.float32)
        us = tl.zeros([ROWS, LANES], tl.float32)
        gf, gs = us, us
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f = row(f_ptr + token * C, c, C, "evict_last")
            b_u = row(g_x_ptr + token * C, c, C, "evict_last") * vector(gain_ptr, c, C)
            b_past = rows(past_f_ptrs, token, c, C, "evict_last")
            uf += fold(b_u * b_f, LANES)
            for k in tl.static_range(N):
                b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_last")
                us = put(us, i, k, fold(b_u * b_s, LANES))
                if len(g_after_ptrs) > 0:
                    b_g = row(stream(g_after_ptrs, k, token, C, N), c, C, "evict_last")
                    gf, gs = put(gf, i, k, fold(b_g * b_f, LANES)), put(gs, i, k, fold(b_g * b_s, LANES))
        uf = tl.sum(tl.sum(uf, 1), 0)
        us, gf, gs = tl.reduce((us, gf, gs), 1, add3)  # each [ROWS]

        keep = 1 - beta
        after2, rstd, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
        # p, then g_h·s and g_h·f
        in_s, in_f = a * keep, tl.sum(a * beta, 0)
        norm_ptr = h_stats_ptr + token * (N + 2)
        of_norm = tl.load(norm_ptr + N + 1)
        pull = (tl.sum(in_s * us, 0) + in_f * uf) * of_norm * of_norm * of_norm * per_width
        hs = of_norm * us - pull * scalars(norm_ptr, i, N)
        hf = of_norm * uf - pull * tl.load(norm_ptr + N)
        A, B, dz, D, E, forgotten = through_scores(
            beta, ss, sf, s1, s2, ff, f2, after2, rstd, a, hs, hf, gf, gs, eps, per_width, per_root, COMPETITIVE
        )
        if COMPETITIVE:
            g_forget -= forgotten
        g_bias = with_each(g_bias, dz, i, N)

        # As in `backward_kernel`; the factor of g_h is in_f in g_f, and in_s in g_s.
        of_w2, of_f = tl.sum(beta * A, 0), tl.sum(beta * beta * B, 0)
        by_s, by_w2, by_f = keep * keep * B + E, keep * A, keep * beta * B
        # second sweep: h and g_h, then g_f, g_s, and the sums over tokens for w1, w2 and the gain
        b_new_w1, b_new_w2, b_new_gain = (), (), ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f, b_g_x = row(f_ptr + token * C, c, C, "evict_first"), row(g_x_ptr + token * C, c, C, "evict_first")
            b_past = rows(past_f_ptrs, token, c, C, "evict_first")
            b_h, b_streams = in_f * b_f, ()
            for k in tl.static_range(N):
                b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_first")
                b_h += pick(in_s, i, k) * b_s
                b_streams = b_streams + (b_s,)
            b_g_x = of_norm * b_g_x
            b_new_gain = b_new_gain + (b_g_gain[tile] + b_g_x * b_h,)
            b_g_h = b_g_x * vector(gain_ptr, c, C) - pull * b_h
            b_w1, b_w2 = vector(w1_ptr, c, C), vector(w2_ptr, c, C)
            b_g_f = in_f * b_g_h + of_w2 * b_w2 + of_f * b_f
            b_to_w1, b_to_w2 = b_g_w1[tile], b_g_w2[tile] + of_w2 * b_f
            for k in tl.static_range(N):
                b_s = b_streams[k]
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
    line_ptr = partial_ptr + program * (3 * C + N + 1)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(line_ptr + c, b_g_w1[tile], mask=c < C)
        tl.store(line_ptr + C + c, b_g_w2[tile], mask=c < C)
        tl.store(line_ptr + 2 * C + N + 1 + c, b_g_gain[tile], mask=c < C)
    tl.store(line_ptr + 2 * C, g_forget)
    for k in tl.static_range(N):
        tl.store(line_ptr + 2 * C + 1 + k, g_bias[k])
