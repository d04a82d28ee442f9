"""Hyper-connections with the norm of the next sublayer inside: h is neither written nor read.

A file of its own: what the passes of `kernels_passes.py` do more, or otherwise, where only a norm reads h. With
x = gain ⊙ h·r the norm's output, r = 1/rms(h), and u = gain ⊙ g_x,

    g_h = r·u − p·h,   p = r³/C · u·h,   g_gain = Σ g_x ⊙ h·r

`read` keeps h·X'_i and r. So `sums` needs no more dot products than without the norm: from u·X_j and u·y follow
u·X'_i, u·h = Σ_i pre_i u·X'_i, and what it needs, g_h·X'_i = r u·X'_i − p h·X'_i. `spread` makes h again from the rows
that it reads anyway: h = Σ_j (Σ_i pre_i mix_ij) X_j + (Σ_i pre_i post_i) y.

So a junction of n streams moves 3n + 2 rows forward and 5n + 5 backward, where beside a norm it is 3n + 4 and 5n + 8.
Forward, h is made of X' as it is stored, rounded, and is not rounded itself; the backward pass makes it, and u·X'_i, of
X' before it was rounded.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.hyper_connection.kernels import _tile


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
