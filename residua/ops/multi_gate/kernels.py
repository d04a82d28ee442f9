"""Multi-Gate Residuals on the GPU: one read and one write of the streams per junction, forward and backward.

Forward: ‖s'‖² and w2·s' follow from dot products of s and f, so the 4n + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f;
‖f‖², w2·f} of one sweep over the channels give β and a, and a second sweep writes s' and h. The scalars are kept for
the backward pass, which needs 3n + 1 more (g_s'_i·f, g_s'_i·s_i, g_h·s_i; g_h·f) and no second reduction.

Registers bound these kernels: they decide how many tokens are in flight at once. So nothing is held from one sweep to
the next. The second sweep reads again what the first left in L1 or L2. Sums over channels are taken inside a thread
first, so that they are one number per thread and stream.

A row of any width is cut into TILES tiles of BLOCK channels, so that 1280 costs five tiles of 256 and not 2048; the
streams of a tile are taken one after another. LANES is the number of threads. Scalars of all streams are [ROWS], with
ROWS = N rounded up to a power of two. Streams come as one tensor [M, N, C], or as N tensors [M, C] while they are still
the outputs of single sublayers.

NORMED: the norm of the next sublayer is inside and h is neither written nor read, for junctions whose h only a norm
reads. With x = gain ⊙ h·r the norm's output, r = 1/rms(h), and u = gain ⊙ g_x,

    g_h = r·u − p·h,   p = r³/C · u·h,   g_gain = Σ g_x ⊙ h·r

h = Σ a_i(1−β_i)·s_i + (Σ a_i β_i)·f is made again from rows that the backward pass reads anyway. The dot products
g_h·s_i and g_h·f that it needs follow from u·s_i, u·f and, kept by the forward pass, h·s_i and h·f: still one
reduction. So a junction moves 2n + 2 rows forward and 3n + 3 backward; with a separate norm it is 2n + 4 and 3n + 6.
A step of S takes 1.129 times an additive one, and 1.149 times with the norm apart (docs/lab/kernels.md, `residua
bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare prenorm,mgr`).

The fill phase only reads streams, h = Σ a_i s_i: `pool_forward_kernel` and its gradient are the same without a write.

Letters: s streams, f update, w1 gate query, w2 pool query, h hidden, a pool weights; ss = ‖s‖², sf = s·f, s1 = w1·s,
s2 = w2·s, ff = ‖f‖², f2 = w2·f; in_s and in_f are the factors of s and f in h. A prefix g_ is a gradient.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime import triton_support
from residua.ops._runtime.kernels import add2, add4

INTERPRETED = tl.constexpr(triton_support.INTERPRETED)


@triton.jit
def wide(b_x):
    """bfloat16 to float32, in pairs: two instructions per pair, where the compiler needs three."""
    if INTERPRETED or b_x.dtype == tl.float32:
        return b_x.to(tl.float32)
    return tl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [b_x], dtype=tl.float32, is_pure=True, pack=2
    )


@triton.jit
def rounded(b_x, dtype: tl.constexpr):
    """x as it is after being stored; in pairs, for converting single numbers runs at an eighth of the rate."""
    if INTERPRETED or dtype == tl.float32:
        return b_x.to(dtype).to(tl.float32)
    return tl.inline_asm_elementwise(
        "{.reg .b32 p; cvt.rn.bf16x2.f32 p, $3, $2; shl.b32 $0, p, 16; and.b32 $1, p, 0xffff0000;}",
        "=&r,=&r,r,r",
        [b_x],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def stream(x_ptrs, k: tl.constexpr, token, C: tl.constexpr, N: tl.constexpr):
    """The token's row of stream k: in the one tensor [M, N, C], or in the k-th of N [M, C]."""
    if len(x_ptrs) == 1:
        row_ptr = x_ptrs[0] + (token * N + k) * C
    else:
        row_ptr = x_ptrs[k] + token * C
    return row_ptr


@triton.jit
def row(row_ptr, c, C: tl.constexpr, POLICY: tl.constexpr):
    """Channels c of a row in float32, [1, BLOCK]. The first sweep keeps its lines in the cache, the second does not."""
    return wide(tl.load(row_ptr + c, mask=c < C, other=0.0, eviction_policy=POLICY))


@triton.jit
def vector(x_ptr, c, C: tl.constexpr):
    return tl.load(x_ptr + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def fold(b_x, LANES: tl.constexpr):
    """[1, BLOCK] to [1, LANES]: the channels that one thread loads together, summed."""
    return tl.sum(tl.reshape(b_x, [1, LANES, b_x.shape[1] // LANES]), 2)


@triton.jit
def put(b_sums, i, k: tl.constexpr, b_x):
    """Add x [1, LANES] to row k of sums [ROWS, LANES]. Rows are in registers, so nothing is compared at run time."""
    return tl.where(i[:, None] == k, b_sums + b_x, b_sums)


@triton.jit
def pick(b_x, i, k: tl.constexpr):
    """Entry k of x [ROWS]."""
    return tl.sum(tl.where(i == k, b_x, -0.0), 0)


@triton.jit
def scalars(x_ptr, i, N: tl.constexpr):
    """N floats from x on, as [ROWS]: every thread loads them itself, so no exchange between threads is needed."""
    b_out = i * 0.0
    for k in tl.static_range(N):
        b_out = tl.where(i == k, tl.load(x_ptr + k), b_out)
    return b_out


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
    """The scalars that `keep_scalars` stored for a token: β, ss, sf, s1 and s2 [ROWS], ff and f2."""
    line_ptr = stats_ptr + token * (5 * N + 2)
    beta, ss, sf = scalars(line_ptr, i, N), scalars(line_ptr + N, i, N), scalars(line_ptr + 2 * N, i, N)
    s1, s2 = scalars(line_ptr + 3 * N, i, N), scalars(line_ptr + 4 * N, i, N)
    return beta, ss, sf, s1, s2, tl.load(line_ptr + 5 * N), tl.load(line_ptr + 5 * N + 1)


@triton.jit
def write_tile(s_ptrs, after_ptr, b_f, beta, a, token, i, c, C: tl.constexpr, N: tl.constexpr):
    """Second sweep: s' = s + β(f − s), h = Σ a s' [1, BLOCK], and the N tiles of s."""
    b_h, b_streams = tl.zeros_like(b_f), ()
    for k in tl.static_range(N):
        b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
        b_streams = b_streams + (b_s,)
        b_s = lerp(b_s, b_f, pick(beta, i, k))
        b_h += pick(a, i, k) * b_s
        tl.store(after_ptr + (token * N + k) * C + c, b_s.to(after_ptr.dtype.element_ty), mask=c < C)
    return b_h, b_streams


@triton.jit
def forward_kernel(
    s_ptrs, f_ptr, w1_ptr, bias_ptr, w2_ptr, gain_ptr, h_ptr, after_ptr, stats_ptr, h_stats_ptr,
    norm_eps, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, COMPETITIVE: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One token. NORMED: x in the place of h, which stays in registers until its norm is known."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    row_ptr = f_ptr + token * C

    ss, sf, s1, s2, ff, f2 = dots(s_ptrs, row_ptr, w1_ptr, w2_ptr, token, i, C, N, ROWS, BLOCK, TILES, LANES)
    # β from w1 · RMS(s), then a from w2 · RMS(s')
    beta = gates(s1 * tl.rsqrt(ss * per_width + eps) * per_root, bias_ptr, i, live, COMPETITIVE)
    _, _, a = pooling(beta, ss, sf, s2, ff, f2, live, eps, per_width, per_root)
    keep_scalars(stats_ptr, token, i, live, beta, ss, sf, s1, s2, ff, f2, N)

    if NORMED:
        # s' and h, and the dot products h·h, h·f and h·s
        b_hidden = ()
        hh, hf = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
        hs = tl.zeros([ROWS, LANES], tl.float32)
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f = row(row_ptr, c, C, "evict_first")
            b_h, b_streams = write_tile(s_ptrs, after_ptr, b_f, beta, a, token, i, c, C, N)
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
            b_x = b_hidden[tile] * rstd * vector(gain_ptr, c, C)
            tl.store(h_ptr + token * C + c, b_x.to(h_ptr.dtype.element_ty), mask=c < C)
    else:
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            b_f = row(row_ptr, c, C, "evict_first")
            b_h, _streams = write_tile(s_ptrs, after_ptr, b_f, beta, a, token, i, c, C, N)
            tl.store(h_ptr + token * C + c, b_h.to(h_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def invert_kernel(
    after_ptr, f_ptr, stats_ptr, s_ptr, floor,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
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
def pool_weights(ss, s2, live, eps, per_width, per_root):
    rstd = tl.rsqrt(ss * per_width + eps)
    b_z = tl.where(live, s2 * rstd * per_root, -float("inf"))
    b_e = tl.exp(b_z - tl.max(b_z, 0))
    return rstd, b_e * (1 / tl.sum(b_e, 0))


@triton.jit
def pool_forward_kernel(
    s_ptrs, w2_ptr, h_ptr, stats_ptr, eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One token; stats are ‖s_i‖² and w2·s_i."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    # first sweep: ‖s_i‖² and w2·s_i, then a
    ss, s2 = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_w2 = vector(w2_ptr, c, C)
        for k in tl.static_range(N):
            b_s = row(stream(s_ptrs, k, token, C, N), c, C, "evict_last")  # [1, BLOCK]
            ss, s2 = put(ss, i, k, fold(b_s * b_s, LANES)), put(s2, i, k, fold(b_s * b_w2, LANES))
    ss, s2 = tl.reduce((ss, s2), 1, add2)  # each [ROWS]
    _, a = pool_weights(ss, s2, live, eps, per_width, per_root)
    tl.store(stats_ptr + token * 2 * N + i, ss, mask=live)
    tl.store(stats_ptr + token * 2 * N + N + i, s2, mask=live)

    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        # second sweep: h = Σ a_i s_i
        b_h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            b_h += pick(a, i, k) * row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
        tl.store(h_ptr + token * C + c, b_h.to(h_ptr.dtype.element_ty), mask=c < C)
