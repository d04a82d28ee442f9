"""GatedNorm on the GPU: a tile of TOKENS rows is read, normalised, gated and written, forward and backward.

The low-rank gate is small matrix products over the tile (RANK is R rounded up to what they take). y = x·rstd·weight
never enters them: rstd comes out of every sum over channels and the weight goes to the small side, so that their large
operand is x as it was loaded, or g·x·s(1 − s) for the gate's gradient. One sweep over the channels finds ‖x‖² and
u = down·y together, and the second sweep finds the tile in L1 or L2. Backward likewise: of m = mean(ŷ·g_ŷ), ŷ = x·rstd,
the part that comes through the gate is Σ_r g_u·u, so that one sweep gives both g_u and m.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    """1/(1 + exp(−x)), the reciprocal as a squared reciprocal root: one instruction instead of a guarded division."""
    r = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return r * r


@triton.jit
def _tile(x, rows, c, C: tl.constexpr, inside, POLICY: tl.constexpr):
    """Channels c of some rows. Policies tell the two sweeps apart: the first wants its lines to stay in the cache."""
    at = x + rows[:, None] * C + c[None, :]
    return tl.load(at, mask=inside[:, None] & (c < C)[None, :], other=0.0, eviction_policy=POLICY)


@triton.jit
def _vector(x, c, C: tl.constexpr):
    return tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)


@triton.jit
def _down(down, r, c, C: tl.constexpr, R: tl.constexpr):
    """down[r, c] as [RANK, BLOCK], in float32."""
    at = down + r[:, None] * C + c[None, :]
    return tl.load(at, mask=(r < R)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _up(up, r, c, C: tl.constexpr, R: tl.constexpr):
    """up[c, r] as [BLOCK, RANK], in float32."""
    at = up + c[:, None] * R + r[None, :]
    return tl.load(at, mask=(c < C)[:, None] & (r < R)[None, :], other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x,
    weight,
    down,
    up,
    out,
    rstds,
    bottleneck,
    tokens,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """TOKENS rows; `bottleneck` is u, kept with rstd for the backward pass."""
    dtype: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = rows < tokens
    r = tl.arange(0, RANK)

    square = tl.zeros([TOKENS], tl.float32)
    u = tl.zeros([TOKENS, RANK], tl.float32)
    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        raw = _tile(x, rows, c, C, inside, "evict_last")
        v = raw.to(tl.float32)
        square += tl.sum(v * v, 1)
        small = (_down(down, r, c, C, R) * _vector(weight, c, C)[None, :]).to(dtype)
        u = tl.dot(raw, tl.trans(small), u, input_precision="ieee")
    rstd = tl.rsqrt(square / C + eps)
    u *= rstd[:, None]
    tl.store(rstds + rows, rstd, mask=inside)
    tl.store(bottleneck + rows[:, None] * R + r[None, :], u, mask=inside[:, None] & (r < R)[None, :])
    t = (u * _sigmoid(u)).to(dtype)

    for first in range(0, C, BLOCK):
        c = first + tl.arange(0, BLOCK)
        v = _tile(x, rows, c, C, inside, "evict_first").to(tl.float32)
        s = _sigmoid(tl.dot(t, tl.trans(_up(up, r, c, C, R).to(dtype)), input_precision="ieee"))
        y = v * rstd[:, None] * _vector(weight, c, C)[None, :] * s
        tl.store(out + rows[:, None] * C + c[None, :], y.to(dtype), mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def backward_kernel(
    g,
    x,
    weight,
    down,
    up,
    rstds,
    bottleneck,
    g_x,
    partial,
    tokens,
    C: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every P-th tile of rows, P the number of programs.

    Each program adds up three gradients in its own part of `partial` [1 + 2R, C], which is zero at first: that of
    weight, and those of down and of up transposed, both still to be multiplied by weight. A part stays in L2; the parts
    are summed afterwards in a fixed order.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    r = tl.arange(0, RANK)
    mine = partial + program.to(tl.int64) * (2 * R + 1) * C
    for tile in range(program, tl.cdiv(tokens, TOKENS), tl.num_programs(0)):
        rows = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        inside = rows < tokens
        rstd = tl.load(rstds + rows, mask=inside, other=0.0)
        u = tl.load(bottleneck + rows[:, None] * R + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
        sigma = _sigmoid(u)
        t = (u * sigma).to(dtype)

        mean = tl.zeros([TOKENS], tl.float32)
        g_t = tl.zeros([TOKENS, RANK], tl.float32)
        for first in range(0, C, BLOCK):
            c = first + tl.arange(0, BLOCK)
            w, narrow = _vector(weight, c, C), _up(up, r, c, C, R)
            v = _tile(x, rows, c, C, inside, "evict_last").to(tl.float32)
            v *= _tile(g, rows, c, C, inside, "evict_last").to(tl.float32)
            s = _sigmoid(tl.dot(t, tl.trans(narrow.to(dtype)), input_precision="ieee"))
            v *= s
            mean += tl.sum(v * w[None, :], 1)
            g_t = tl.dot((v - v * s).to(dtype), (narrow * w[:, None]).to(dtype), g_t, input_precision="ieee")
        g_u = g_t * rstd[:, None] * sigma * (1 + u * (1 - sigma))
        mean = (mean * rstd + tl.sum(g_u * u, 1)) / C
        t_r, g_u_r = tl.trans((u * sigma * rstd[:, None]).to(dtype)), tl.trans((g_u * rstd[:, None]).to(dtype))
        g_u = g_u.to(dtype)

        for first in range(0, C, BLOCK):
            c = first + tl.arange(0, BLOCK)
            w = _vector(weight, c, C)
            raw = _tile(x, rows, c, C, inside, "evict_first")
            v, g_y = raw.to(tl.float32), _tile(g, rows, c, C, inside, "evict_first").to(tl.float32)
            s = _sigmoid(tl.dot(t, tl.trans(_up(up, r, c, C, R).to(dtype)), input_precision="ieee"))
            g_y *= s
            z = v * g_y
            z -= z * s
            g_y = tl.dot(g_u, _down(down, r, c, C, R).to(dtype), g_y, input_precision="ieee")
            new = g_y * w[None, :] * rstd[:, None] - v * (rstd * rstd * mean)[:, None]
            tl.store(g_x + rows[:, None] * C + c[None, :], new.to(dtype), mask=inside[:, None] & (c < C)[None, :])

            at = mine + c
            tl.store(at, tl.load(at, mask=c < C, other=0.0) + tl.sum(g_y * v * rstd[:, None], 0), mask=c < C)
            at, there = mine + C + r[:, None] * C + c[None, :], (r < R)[:, None] & (c < C)[None, :]
            to_down = tl.dot(g_u_r, raw, tl.load(at, mask=there, other=0.0), input_precision="ieee")
            tl.store(at, to_down, mask=there)
            at += R * C
            to_up = tl.dot(t_r, z.to(dtype), tl.load(at, mask=there, other=0.0), input_precision="ieee")
            tl.store(at, to_up, mask=there)
