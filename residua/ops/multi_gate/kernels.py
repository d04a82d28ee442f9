"""Multi-Gate Residuals on the GPU: one read and one write of the streams per junction, forward and backward.

Forward: ‖s'‖² and w2·s' follow from dot products of s and f, so the 4n + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f;
‖f‖², w2·f} of one sweep over the channels give β and a, and a second sweep writes s' and h. The scalars are kept for
the backward pass, which needs 3n + 1 more (g_s'_i·f, g_s'_i·s_i, g_h·s_i; g_h·f) and no second reduction.

Registers bound these kernels: they decide how many tokens are in flight at once. So nothing is held from one sweep to
the next. The second sweep reads again what the first left in L1 or L2, and sums over channels are taken inside a thread
first, so that they are one number per thread and stream.

A row of any width is cut into TILES tiles of BLOCK channels, so that 1280 costs five tiles of 256 and not 2048; the
streams of a tile are taken one after another. LANES is the number of threads. Scalars of all streams are [ROWS], with
ROWS = N rounded up to a power of two. Streams come as one tensor [M, N, C], or as N tensors [M, C] while they are still
the outputs of single sublayers.

Letters: s streams, f update, w1 gate query, w2 pool query, h hidden, a pool weights; ss = ‖s‖², sf = s·f, s1 = w1·s,
s2 = w2·s, ff = ‖f‖², f2 = w2·f. A prefix g_ is a gradient.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.multi_gate.kernels_tile import add2, add3, add4, fold, pick, put, rounded, row, scalars, stream, vector


@triton.jit
def lerp(b_s, b_f, beta):
    """s' = s + β(f − s), always with the same two roundings: a repeated junction must give the same streams."""
    return tl.fma(beta, b_f - b_s, b_s)


@triton.jit
def gates(b_z, bias_ptr, i, live, COMPETITIVE: tl.constexpr):
    """β [ROWS] from the scores z [ROWS]; padded rows get 0."""
    if COMPETITIVE:
        forget = tl.load(bias_ptr).to(tl.float32)
        b_z = tl.where(live, b_z + tl.load(bias_ptr + 1 + i, mask=live, other=0.0).to(tl.float32), -float("inf"))
        b_top = tl.maximum(tl.max(b_z, 0), forget)
        b_e = tl.exp(b_z - b_top)
        return b_e * (1 / (tl.sum(b_e, 0) + tl.exp(forget - b_top)))
    return tl.where(live, tl.sigmoid(b_z + tl.load(bias_ptr + i, mask=live, other=0.0).to(tl.float32)), 0.0)


@triton.jit
def pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root):
    """w2·s', 1/rms(s') and a, from the scalars of s and f."""
    keep = 1 - beta
    norm = keep * keep * ss + 2 * beta * keep * sf + beta * beta * ff
    rstd = tl.rsqrt(tl.maximum(norm, 0.0) * per_width + eps)
    after2 = keep * s2 + beta * f2
    z = tl.where(live, after2 * rstd * per_root, -float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    return after2, rstd, e * (1 / tl.sum(e, 0))


@triton.jit
def dots(
    s_ptrs, row_ptr, w1_ptr, w2_ptr, token, i,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """First sweep of a forward pass: the 4N + 2 dot products of s, f, w1 and w2; `row_ptr` is the token's row of f."""
    ss, sf = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    s1, s2 = ss, sf
    ff, f2 = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_f, b_w1, b_w2 = row(row_ptr, c, C, "evict_last"), vector(w1_ptr, c, C), vector(w2_ptr, c, C)
        for k in tl.static_range(N):
            b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_last")  # [1, BLOCK]
            ss, sf = put(ss, i, k, fold(b_s * b_s, LANES)), put(sf, i, k, fold(b_s * b_f, LANES))
            s1, s2 = put(s1, i, k, fold(b_s * b_w1, LANES)), put(s2, i, k, fold(b_s * b_w2, LANES))
        ff, f2 = ff + fold(b_f * b_f, LANES), f2 + fold(b_f * b_w2, LANES)
    ss, sf, s1, s2 = tl.reduce((ss, sf, s1, s2), 1, add4)  # each [ROWS]
    ff, f2 = tl.reduce((ff, f2), 1, add2)  # each [1]
    return ss, sf, s1, s2, ff, f2


@triton.jit
def keep_scalars(stats_ptr, token, i, live, beta, ss, sf, s1, s2, ff, f2, N: tl.constexpr):
    """Keep β and the scalars for the backward pass."""
    line_ptr = stats_ptr + token * (5 * N + 2)
    tl.store(line_ptr + i, beta, mask=live)
    tl.store(line_ptr + N + i, ss, mask=live)
    tl.store(line_ptr + 2 * N + i, sf, mask=live)
    tl.store(line_ptr + 3 * N + i, s1, mask=live)
    tl.store(line_ptr + 4 * N + i, s2, mask=live)
    tl.store(line_ptr + 5 * N + tl.arange(0, 1), ff)
    tl.store(line_ptr + 5 * N + 1 + tl.arange(0, 1), f2)


@triton.jit
def kept_scalars(stats_ptr, token, i, N: tl.constexpr):
    """What `keep_scalars` kept of a token: β, ss, sf, s1 and s2 [ROWS], ff and f2."""
    line_ptr = stats_ptr + token * (5 * N + 2)
    beta, ss, sf = scalars(line_ptr, i, N), scalars(line_ptr + N, i, N), scalars(line_ptr + 2 * N, i, N)
    s1, s2 = scalars(line_ptr + 3 * N, i, N), scalars(line_ptr + 4 * N, i, N)
    return beta, ss, sf, s1, s2, tl.load(line_ptr + 5 * N), tl.load(line_ptr + 5 * N + 1)


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
def forward_kernel(
    s_ptrs,
    f_ptr,
    w1_ptr,
    bias_ptr,
    w2_ptr,
    h_ptr,
    after_ptr,
    stats_ptr,
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
    row_ptr = f_ptr + token * C

    ss, sf, s1, s2, ff, f2 = dots(s_ptrs, row_ptr, w1_ptr, w2_ptr, token, i, C, N, ROWS, BLOCK, TILES, LANES)
    # β from w1 · RMS(s), then a from w2 · RMS(s')
    beta = gates(s1 * tl.rsqrt(ss * per_width + eps) * per_root, bias_ptr, i, live, COMPETITIVE)
    _, _, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)

    keep_scalars(stats_ptr, token, i, live, beta, ss, sf, s1, s2, ff, f2, N)

    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_f = row(row_ptr, c, C, "evict_first")
        # second sweep: s' = s + β(f − s), h = Σ a s'
        b_h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
            b_s = lerp(b_s, b_f, pick(beta, i, k))
            b_h += pick(a, i, k) * b_s
            tl.store(after_ptr + (token * N + k) * C + c, b_s.to(after_ptr.dtype.element_ty), mask=c < C)
        tl.store(h_ptr + token * C + c, b_h.to(h_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def invert_kernel(
    after_ptr,
    f_ptr,
    stats_ptr,
    s_ptr,
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
        b_f = row(f_ptr + token * C, c, C, "evict_first")
        for k in tl.static_range(N):
            beta = tl.load(stats_ptr + token * (5 * N + 2) + k)
            b_s = row(after_ptr + (token * N + k) * C, c, C, "evict_first")  # [1, BLOCK]
            b_s = (b_s - beta * b_f) / tl.maximum(1 - beta, floor)
            tl.store(s_ptr + (token * N + k) * C + c, b_s.to(s_ptr.dtype.element_ty), mask=c < C)


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
def backward_kernel(
    g_h_ptr,
    g_after_ptrs,
    start_ptrs,
    past_f_ptrs,
    past_stats_ptrs,
    f_ptr,
    w1_ptr,
    w2_ptr,
    stats_ptr,
    g_s_ptrs,
    g_f_ptr,
    partial_ptr,
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

    The gradients of w1, w2 and the biases are summed in registers; each program writes one row of `partial`.
    """
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    b_g_w1, b_g_w2 = (), ()
    for _ in tl.static_range(TILES):
        b_g_w1, b_g_w2 = b_g_w1 + (tl.zeros([1, BLOCK], tl.float32),), b_g_w2 + (tl.zeros([1, BLOCK], tl.float32),)
    g_bias, g_forget = (), 0.0
    for _ in tl.static_range(N):
        g_bias = g_bias + (0.0,)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        beta, ss, sf, s1, s2, ff, f2 = kept_scalars(stats_ptr, token, i, N)
        betas = past_gates(past_stats_ptrs, token, i, N)

        # first sweep: the dot products g_h·f, g_h·s, g_s'·f and g_s'·s
        hf = tl.zeros([1, LANES], tl.float32)
        hs = tl.zeros([ROWS, LANES], tl.float32)
        gf, gs = hs, hs
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f, b_g_h = row(f_ptr + token * C, c, C, "evict_last"), row(g_h_ptr + token * C, c, C, "evict_last")
            b_past = rows(past_f_ptrs, token, c, C, "evict_last")
            hf += fold(b_g_h * b_f, LANES)
            for k in tl.static_range(N):
                b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_last")
                hs = put(hs, i, k, fold(b_g_h * b_s, LANES))
                if len(g_after_ptrs) > 0:
                    b_g = row(stream(g_after_ptrs, k, token, C, N), c, C, "evict_last")
                    gf, gs = put(gf, i, k, fold(b_g * b_f, LANES)), put(gs, i, k, fold(b_g * b_s, LANES))
        hf = tl.sum(hf, 1)
        hs, gf, gs = tl.reduce((hs, gf, gs), 1, add3)  # each [ROWS]

        keep = 1 - beta
        after2, rstd, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
        A, B, dz, D, E, forgotten = through_scores(
            beta, ss, sf, s1, s2, ff, f2, after2, rstd, a, hs, hf, gf, gs, eps, per_width, per_root, COMPETITIVE
        )
        if COMPETITIVE:
            g_forget -= forgotten
        g_bias = with_each(g_bias, dz, i, N)

        # With s' = (1−β)s + βf, the parts of g_f and of w2's gradient in f, g_h and w2 are factored out of the sums;
        # g_s is a sum of s, g_s', g_h, f, w1 and w2 with one factor each.
        of_h, of_w2, of_f = tl.sum(beta * a, 0), tl.sum(beta * A, 0), tl.sum(beta * beta * B, 0)
        by_s, by_h, by_w2, by_f = keep * keep * B + E, keep * a, keep * A, keep * beta * B
        # second sweep: g_f, g_s, and the sums over tokens for w1 and w2
        b_new_w1, b_new_w2 = (), ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_w1, b_w2 = vector(w1_ptr, c, C), vector(w2_ptr, c, C)
            b_f, b_g_h = row(f_ptr + token * C, c, C, "evict_first"), row(g_h_ptr + token * C, c, C, "evict_first")
            b_past = rows(past_f_ptrs, token, c, C, "evict_first")
            b_g_f = of_h * b_g_h + of_w2 * b_w2 + of_f * b_f
            b_to_w1, b_to_w2 = b_g_w1[tile], b_g_w2[tile] + of_w2 * b_f
            for k in tl.static_range(N):
                b_s = again(start_ptrs, b_past, betas, i, k, token, c, C, N, "evict_first")
                b_g_f += pick(by_f, i, k) * b_s
                b_to_w1 += pick(D, i, k) * b_s
                b_to_w2 += pick(by_w2, i, k) * b_s
                b_g_s = pick(by_s, i, k) * b_s + pick(by_h, i, k) * b_g_h
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
        b_g_w1, b_g_w2 = b_new_w1, b_new_w2

    # this program's row of `partial`: w1, w2, the forget bias, the biases
    line_ptr = partial_ptr + program * (2 * C + N + 1)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(line_ptr + c, b_g_w1[tile], mask=c < C)
        tl.store(line_ptr + C + c, b_g_w2[tile], mask=c < C)
    tl.store(line_ptr + 2 * C, g_forget)
    for k in tl.static_range(N):
        tl.store(line_ptr + 2 * C + 1 + k, g_bias[k])
