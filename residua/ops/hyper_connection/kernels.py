"""Hyper-connections of at most 4 streams on the GPU, forward: a junction's write, the next one's weights and its read.

    X'_i = Σ_j mix_ij X_j + post_i y,   z = RMS(X') φᵀ,   h = Σ_i pre_i X'_i,   pre from z

NORM says where z comes from. "all": RMS over all streams as one vector, φ [K, N·C], pre_i = σ(scale z_i + bias_i);
"each": RMS of each stream, φ [K, C], z [N, K], pre_i = bias_i + scale tanh(z_i0); "none": no z, pre_i = bias_i.
Either way z is one row of Z numbers in a tile of RANK columns, K of which, or all, belong to a stream.

Two passes each way, each shaped for what it does. φ is read once for every tile of tokens, so the tiles that it is
multiplied with are long. Work that needs a whole row of channels is done in short tiles, which hold it.

    forward:   write   X' = mix X + post y, ‖X'‖² and X' φᵀ
               read    z and pre from them, h = Σ pre_i X'_i
    backward:  sums    dh · X_j and dh · y, and from them dz                               (`kernels_backward.py`)
               spread  G_i, and from it all the gradients

Without a projection nothing waits for a whole row: `write` computes h as well, `spread` the gradient of pre. The same
if pre is GIVEN for each token, with z as well: there is one pass each way. A second pass goes through the tokens
backwards, for the cache holds the last rows of the first one. A step of mHC at S takes 1.368 times an additive one;
with one kernel each way it takes 1.482 times (docs/lab/kernels.md, `residua bench step mgr-s-prenorm --micro-batch 32
--accumulate 4 --compare prenorm,mhc`).

NORMED: with a projection, the norm after the junction is inside and h is neither written nor read: 1.305 times in that
step, with later tiles, not measured alone. With x = gain ⊙ h·r the norm's output, r = 1/rms(h), and u = gain ⊙ g_x,

    g_h = r·u − p·h,   p = r³/C · u·h,   g_gain = Σ g_x ⊙ h·r

`read` keeps h·X'_i and r. So `sums` needs no more dot products than without the norm: from u·X_j and u·y follow
u·X'_i, u·h = Σ_i pre_i u·X'_i, and what it needs, g_h·X'_i = r u·X'_i − p h·X'_i. `spread` makes h again from the rows
that it reads anyway: h = Σ_j (Σ_i pre_i mix_ij) X_j + (Σ_i pre_i post_i) y.
So a junction of n streams moves 3n + 2 rows forward and 5n + 5 backward; with a separate norm it is 3n + 4 and 5n + 8.
Forward, h is computed from X' as stored, rounded, and is not rounded itself; the backward pass makes it, and u·X'_i, of
X' before it was rounded.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime import triton_support

INTERPRETED = tl.constexpr(triton_support.INTERPRETED)


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
def _read(b_streams, b_pre, N: tl.constexpr):
    """h = Σ_i pre_i X'_i of one tile."""
    b_h = b_pre[0][:, None] * b_streams[0].to(tl.float32)
    for i in tl.static_range(1, N):
        b_h += b_pre[i][:, None] * b_streams[i].to(tl.float32)
    return b_h


@triton.jit
def gains(gain_ptr, t, c, mask):
    """The gain [TOKENS, BLOCK]: loaded for each token, in the tiles' layout, which one row would be brought to."""
    return _tile(gain_ptr, t[:, None] * 0 + c[None, :], mask)


@triton.jit
def store_normed(
    b_tiles, b_pre, gain_ptr, x_ptr, h_stats_ptr, t, live, norm_eps,
    C: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """x = gain ⊙ h·r, and h·X'_i and r, from the tiles of X' and pre."""
    b_dots = ()
    for _ in tl.static_range(N + 1):
        b_dots = b_dots + (tl.zeros([TOKENS, BLOCK], tl.float32),)
    # h·X'_i and h·h
    for g in tl.static_range(TILES):
        b_h, b_more = _read(b_tiles[g], b_pre, N), ()
        for i in tl.static_range(N):
            b_more = b_more + (b_dots[i] + b_h * b_tiles[g][i].to(tl.float32),)
        b_dots = b_more + (b_dots[N] + b_h * b_h,)
    b_sums = ()
    for i in tl.static_range(N + 1):
        b_sums = b_sums + (tl.sum(b_dots[i], 1),)  # [TOKENS]
    b_r = tl.rsqrt(b_sums[N] / C + norm_eps)
    # x = gain ⊙ h·r
    for g in tl.static_range(TILES):
        c = g * BLOCK + tl.arange(0, BLOCK)
        mask = live[:, None] & (c < C)[None, :]
        b_x = _read(b_tiles[g], b_pre, N) * b_r[:, None] * gains(gain_ptr, t, c, mask)
        tl.store(x_ptr + t[:, None] * C + c[None, :], b_x.to(x_ptr.dtype.element_ty), mask=mask)
    stats_ptr = h_stats_ptr + t * (N + 1)
    for i in tl.static_range(N):
        tl.store(stats_ptr + i, b_sums[i], mask=live)
    tl.store(stats_ptr + N, b_r, mask=live)


@triton.jit
def write_kernel(
    x_ptr, y_ptr, post_ptr, mix_ptr, bias_ptr, phi_ptr, after_ptr, h_ptr, pre_ptr, sums_ptr, rstd_ptr,
    tokens, stride_post, stride_mix, eps,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """X', z before the norm and ‖X'‖², SUMS numbers for each token; without a projection h, with pre the bias.

    GIVEN: pre is read, not written, and sums are z itself, next to rstd; norms of each stream only.

    φ [PARTS, K, ...] comes in the streams' dtype; two parts: rounded, and what rounding took from it, so that z is not
    rounded. A row of the product has RANK columns for each of them.
    """
    dtype: tl.constexpr = after_ptr.dtype.element_ty
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live, k = t < tokens, tl.arange(0, RANK)
    column = tl.arange(0, PARTS * RANK)
    rows_ptr = phi_ptr + (column // RANK * (K * C * (N if NORM == "all" else 1)))[:, None]
    b_post = _numbers(post_ptr + t * stride_post, t, live, N)
    b_mix = _numbers(mix_ptr + t * stride_mix, t, live, N * N)
    if GIVEN:
        b_pre = _numbers(pre_ptr + t * N, t, live, N)
    b_z, b_square = tl.zeros([TOKENS, PARTS * RANK], tl.float32), ()
    for _ in tl.static_range(N):
        b_square = b_square + (tl.zeros([TOKENS], tl.float32),)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
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
                if GIVEN:
                    b_all += b_pre[i][:, None] * b_v
                if NORM == "all":
                    b_all += b_v * b_v
                else:
                    b_square = _replaced(b_square, i, b_square[i] + tl.sum(b_v * b_v, 1), N)
        if NORM == "all":
            b_square = _replaced(b_square, 0, b_square[0] + tl.sum(b_all, 1), N)
        if NORM == "none" or GIVEN:
            tl.store(h_ptr + t[:, None] * C + c[None, :], b_all.to(dtype), mask=mask)
    if NORM == "none":
        for i in tl.static_range(N):
            b_pre = tl.zeros([TOKENS], tl.float32) + tl.load(bias_ptr + i).to(tl.float32)
            tl.store(pre_ptr + t * N + i, b_pre, mask=live)
    else:
        b_z = tl.sum(tl.reshape(b_z, [TOKENS, PARTS, RANK]), 1)
        if GIVEN:
            b_rstd = tl.zeros([TOKENS, RANK], tl.float32)
            for i in tl.static_range(N):
                b_own = tl.rsqrt(b_square[i] / C + eps)
                b_rstd += tl.where(_belongs(k, i, K, NORM)[None, :], b_own[:, None], 0.0)
            b_z *= b_rstd
            tl.store(rstd_ptr + t[:, None] * Z + k[None, :], b_rstd, mask=live[:, None] & (k < Z)[None, :])
        to_ptr = sums_ptr + t * SUMS
        tl.store(to_ptr[:, None] + k[None, :], b_z, mask=live[:, None] & (k < Z)[None, :])
        for i in tl.static_range(SUMS - Z):
            tl.store(to_ptr + Z + i, b_square[i], mask=live)


@triton.jit
def read_kernel(
    after_ptr, sums_ptr, scale_ptr, bias_ptr, gain_ptr, h_ptr, z_ptr, rstd_ptr, pre_ptr, h_stats_ptr,
    tokens, eps, norm_eps,
    C: tl.constexpr, N: tl.constexpr, K: tl.constexpr, Z: tl.constexpr, RANK: tl.constexpr, SUMS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORMED: tl.constexpr,
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
    is_z, which = live[:, None] & (k < Z)[None, :], k * 0 if NORM == "all" else k // K
    from_ptr = sums_ptr + t[:, None] * SUMS
    b_z = tl.load(from_ptr + k[None, :], mask=is_z, other=0.0)
    b_square = tl.load(from_ptr + Z + which[None, :], mask=is_z, other=0.0)
    b_rstd = tl.rsqrt(b_square / (C * N if NORM == "all" else C) + eps)
    tl.store(z_ptr + t[:, None] * Z + k[None, :], b_z * b_rstd, mask=is_z)
    tl.store(rstd_ptr + t[:, None] * Z + k[None, :], b_rstd, mask=is_z)

    # pre from its numbers of z, which are loaded again: taken out of b_z they would bring its layout to the tiles
    b_pre = ()
    for i in tl.static_range(N):
        b_own = tl.load(sums_ptr + t * SUMS + (i if NORM == "all" else i * K), mask=live, other=0.0)
        b_length = tl.load(sums_ptr + t * SUMS + Z + (0 if NORM == "all" else i), mask=live, other=0.0)
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
