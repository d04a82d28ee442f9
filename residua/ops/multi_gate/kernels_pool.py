"""The fill phase on the GPU: streams that are only read, h = Σ a_i s_i. The kernels of `kernels.py` without a write.

A stream's gradient passes through every read of it, and each adds its own part: no other pass has to sum gradients.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops.multi_gate.kernels_tile import add2, fold, pick, put, row, scalars, stream, vector


@triton.jit
def _weights(ss, s2, live, eps, per_width, per_root):
    rstd = tl.rsqrt(ss * per_width + eps)
    b_z = tl.where(live, s2 * rstd * per_root, -float("inf"))
    b_e = tl.exp(b_z - tl.max(b_z, 0))
    return rstd, b_e * (1 / tl.sum(b_e, 0))


@triton.jit
def pool_forward_kernel(
    s_ptrs,
    w2_ptr,
    h_ptr,
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
):
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
    _, a = _weights(ss, s2, live, eps, per_width, per_root)
    tl.store(stats_ptr + token * 2 * N + i, ss, mask=live)
    tl.store(stats_ptr + token * 2 * N + N + i, s2, mask=live)

    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        # second sweep: h = Σ a_i s_i
        b_h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            b_h += pick(a, i, k) * row(stream(s_ptrs, k, token, C, N), c, C, "evict_first")
        tl.store(h_ptr + token * C + c, b_h.to(h_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def pool_backward_kernel(
    g_h_ptr,
    g_after_ptrs,
    s_ptrs,
    w2_ptr,
    stats_ptr,
    g_s_ptrs,
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
):
    """Every P-th token. g_s = g_s' + a·g_h + A·w2 + B·s with A and B as in `backward_kernel`, s' being s."""
    program = tl.program_id(0)
    i = tl.arange(0, ROWS)
    live = i < N
    b_g_w2 = ()
    for _ in tl.static_range(TILES):
        b_g_w2 = b_g_w2 + (tl.zeros([1, BLOCK], tl.float32),)

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
        rstd, a = _weights(ss, s2, live, eps, per_width, per_root)
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
