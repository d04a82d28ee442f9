"""The fill phase on the GPU: streams that are only read, h = Σ a_i s_i, and the sum that ends a backward pass.

The kernels of `kernels.py` without a write. A stream's gradient goes through every read of it, each adding its own, so
that no other pass has to add gradients up.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.multi_gate.kernels_tile import add2, fold, pick, put, row, scalars, stream, vector


@triton.jit
def _weights(ss, s2, live, eps, per_width, per_root):
    rstd = tl.rsqrt(ss * per_width + eps)
    z = tl.where(live, s2 * rstd * per_root, -float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    return rstd, e * (1 / tl.sum(e, 0))


@triton.jit
def pool_forward_kernel(
    streams,
    query,
    hidden,
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
):
    """One token; stats are ‖s_i‖² and w2·s_i."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    ss, s2 = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        w2 = vector(query, c, C)
        for k in tl.static_range(N):
            s = row(stream(streams, k, token, C, N), c, C, "evict_last")
            ss, s2 = put(ss, i, k, fold(s * s, LANES)), put(s2, i, k, fold(s * w2, LANES))
    ss, s2 = tl.reduce((ss, s2), 1, add2)
    _, a = _weights(ss, s2, live, eps, per_width, per_root)
    tl.store(stats + token * 2 * N + i, ss, mask=live)
    tl.store(stats + token * 2 * N + N + i, s2, mask=live)

    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            h += pick(a, i, k) * row(stream(streams, k, token, C, N), c, C, "evict_first")
        tl.store(hidden + token * C + c, h.to(hidden.dtype.element_ty), mask=c < C)


@triton.jit
def pool_backward_kernel(
    g_hidden,
    g_after,
    streams,
    query,
    stats,
    g_streams,
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
):
    """Every P-th token. g_s = g_s' + a·g_h + A·w2 + B·s with A and B as in `backward_kernel`, s' being s."""
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    g_w2 = ()
    for _ in tl.static_range(TILES):
        g_w2 = g_w2 + (tl.zeros([1, BLOCK], tl.float32),)

    for turn in tl.range(tl.cdiv(tokens - program, tl.num_programs(0))):
        token = program.to(tl.int64) + turn * tl.num_programs(0)
        line = stats + token * 2 * N
        ss, s2 = scalars(line, i, N), scalars(line + N, i, N)
        hs = tl.zeros([ROWS, LANES], tl.float32)
        for tile in range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            h = row(g_hidden + token * C, c, C, "evict_last")
            for k in tl.static_range(N):
                hs = put(hs, i, k, fold(h * row(stream(streams, k, token, C, N), c, C, "evict_last"), LANES))
        hs = tl.sum(hs, 1)
        rstd, a = _weights(ss, s2, live, eps, per_width, per_root)
        A = a * (hs - tl.sum(a * hs, 0)) * rstd * per_root
        B = -A * s2 * rstd * rstd * per_width

        new_w2 = ()
        for tile in tl.static_range(TILES):
            c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
            h, w2, to_w2 = row(g_hidden + token * C, c, C, "evict_first"), vector(query, c, C), g_w2[tile]
            for k in tl.static_range(N):
                s = row(stream(streams, k, token, C, N), c, C, "evict_first")
                to_w2 += pick(A, i, k) * s
                g = pick(B, i, k) * s + pick(a, i, k) * h
                g += pick(A, i, k) * w2
                if len(g_after) > 0:
                    g += row(stream(g_after, k, token, C, N), c, C, "evict_first")
                tl.store(stream(g_streams, k, token, C, N) + c, g.to(g_streams[0].dtype.element_ty), mask=c < C)
            new_w2 = new_w2 + (to_w2,)
        g_w2 = new_w2

    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(partial + program * C + c, g_w2[tile], mask=c < C)
