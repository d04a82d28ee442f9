"""Triton kernels of a forward pass over whole sequences: heads, and junctions with the norm after them.

All are bound by memory: each reads its rows once. Equations and letters are those of `reference.py`.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor
from residua.ops.depth_attention.kernels import load_row, log_sum_exp, store_row
from residua.ops.multi_gate.kernels import (
    add2,
    add4,
    fold,
    gates,
    lerp,
    pick,
    pooling,
    put,
    row,
    scalars,
    vector,
)


@triton.jit
def _tile(x_ptr, batch, start, group, stride_b, stride_t, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
          GROUP: tl.constexpr):  # fmt: skip
    """Pointers to the first half of a group's first head, for ROWS tokens of a sequence from `start` on."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    begin = batch.to(tl.int64) * stride_b + start.to(tl.int64) * stride_t + group * (GROUP * 2 * HALF)
    return x_ptr + begin + (row * stride_t + lane)


@triton.jit
def _halves(x_ptr, mask, HALF: tl.constexpr):
    return tl.load(x_ptr, mask=mask, other=0.0), tl.load(x_ptr + HALF, mask=mask, other=0.0)


@triton.jit
def _put(x_ptr, b_x1, b_x2, mask, HALF: tl.constexpr):
    tl.store(x_ptr, b_x1.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + HALF, b_x2.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of heads [ROWS, LANES]: gain ⊙ RMS(x), then rotated."""
    b_x1, b_x2 = b_x1.to(tl.float32), b_x2.to(tl.float32)
    if NORM:
        b_rstd = tl.rsqrt((tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / (2 * HALF))[:, None] + eps)
        b_x1, b_x2 = b_x1 * b_rstd * b_w1, b_x2 * b_rstd * b_w2
    return b_x1 * b_cos - b_x2 * b_sin, b_x2 * b_cos + b_x1 * b_sin


@triton.jit
def _mixed(b_a, b_x, anchor_scale_ptr, scale_ptr, live):
    """λ1 ⊙ a + λ2 ⊙ x."""
    b_1 = tl.load(anchor_scale_ptr, mask=live, other=0.0).to(tl.float32)
    b_2 = tl.load(scale_ptr, mask=live, other=0.0).to(tl.float32)
    return b_1 * b_a.to(tl.float32) + b_2 * b_x.to(tl.float32)


@triton.jit(do_not_specialize=["length", "tiles", "groups", "query_groups", "key_groups"])
def heads_kernel(
    x_ptr, query_gain_ptr, key_gain_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, anchor_ptr, anchor_scale_ptr, scale_ptr,
    length, tiles, groups, query_groups, key_groups, stride_xb, stride_xt, stride_qb, stride_qt, stride_kb, stride_kt,
    stride_ab, stride_at, stride_sh, stride_sd, eps,
    HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, NORM: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of GROUP heads: of queries, then keys, then values, as the projection has them."""
    group, block = tl.program_id(0) % groups, tl.program_id(0) // groups
    batch, start = block // tiles, block % tiles * ROWS
    lane, token = tl.arange(0, LANES)[None, :], (start + tl.arange(0, ROWS))[:, None]
    mask = (token < length) & (lane < HALF)
    source_ptr = _tile(x_ptr, batch, start, group, stride_xb, stride_xt, HALF, LANES, ROWS, GROUP)
    if group < query_groups + key_groups:
        b_cos = tl.load(cos_ptr + token * HALF + lane, mask=mask, other=0.0)  # [ROWS, LANES]
        b_sin = tl.load(sin_ptr + token * HALF + lane, mask=mask, other=0.0)
        if group < query_groups:
            target_ptr = _tile(q_ptr, batch, start, group, stride_qb, stride_qt, HALF, LANES, ROWS, GROUP)
            b_w1, b_w2 = _halves(query_gain_ptr + lane, lane < HALF, HALF)
        else:
            first = group - query_groups
            target_ptr = _tile(k_ptr, batch, start, first, stride_kb, stride_kt, HALF, LANES, ROWS, GROUP)
            b_w1, b_w2 = _halves(key_gain_ptr + lane, lane < HALF, HALF)
        for head in tl.static_range(GROUP):
            # a query or a key: normed, rotated
            b_x1, b_x2 = _halves(source_ptr + head * 2 * HALF, mask, HALF)
            b_y1, b_y2 = _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF, NORM)
            _put(target_ptr + head * 2 * HALF, b_y1, b_y2, mask, HALF)
    else:
        first = group - query_groups - key_groups
        target_ptr = _tile(v_ptr, batch, start, first, stride_kb, stride_kt, HALF, LANES, ROWS, GROUP)
        for head in tl.static_range(GROUP):
            # a value, as it is or mixed with its anchor
            b_x1, b_x2 = _halves(source_ptr + head * 2 * HALF, mask, HALF)
            if MIXED:
                own_ptr = _tile(anchor_ptr, batch, start, first, stride_ab, stride_at, HALF, LANES, ROWS, GROUP)
                b_a1, b_a2 = _halves(own_ptr + head * 2 * HALF, mask, HALF)
                here = (first * GROUP + head) * stride_sh + lane * stride_sd
                there = here + HALF * stride_sd
                b_y1 = _mixed(b_a1, b_x1, anchor_scale_ptr + here, scale_ptr + here, lane < HALF)
                b_y2 = _mixed(b_a2, b_x2, anchor_scale_ptr + there, scale_ptr + there, lane < HALF)
                _put(target_ptr + head * 2 * HALF, b_y1, b_y2, mask, HALF)
            else:
                _put(target_ptr + head * 2 * HALF, b_x1, b_x2, mask, HALF)


@triton.jit(do_not_specialize=["tokens", "count"])
def read_norm_kernel(
    table_ptr, base_ptr, y_ptr, u_ptr, weight_ptr, v_ptr, normed_ptr, tokens, count, eps, key_eps,
    C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    UNROLL: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The table holds the `count` addresses of the other sources, then those of their scores for this read."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = t < tokens
    t = tl.minimum(t, tokens - 1)
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    b_v_low, b_v_high = load_row(y_ptr, t, low, high, C, live)
    if ADD:
        # v = base + y, rounded as it is stored
        b_base_low, b_base_high = load_row(base_ptr, t, low, high, C, live)
        b_v_low = (b_v_low + b_base_low).to(dtype).to(tl.float32)
        b_v_high = (b_v_high + b_base_high).to(dtype).to(tl.float32)
        store_row(v_ptr, t, low, high, C, live, b_v_low, b_v_high)
    b_u_low = tl.load(u_ptr + low, mask=low < C, other=0.0)[None, :]  # [1, LOW]
    b_u_high = tl.load(u_ptr + high, mask=high < C, other=0.0)[None, :]  # [1, HIGH]
    # z = u · RMS(v) of the newest source, and lse over all
    b_rstd = tl.rsqrt((tl.sum(b_v_low * b_v_low, 1) + tl.sum(b_v_high * b_v_high, 1)) / C + key_eps)  # [TOKENS]
    b_z = b_rstd * (tl.sum(b_v_low * b_u_low, 1) + tl.sum(b_v_high * b_u_high, 1))
    b_lse = log_sum_exp(table_ptr + count, count, t, b_z, tl.full([TOKENS], 1.0, tl.float32), LANES)

    # h = Σ_i exp(z_i − lse) v_i, beginning with v
    b_a = tl.exp(b_z - b_lse)
    b_h_low, b_h_high = b_a[:, None] * b_v_low, b_a[:, None] * b_v_high
    for start in range(0, count, UNROLL):
        for i in tl.static_range(UNROLL):
            exists = start + i < count
            slot = tl.minimum(start + i, count - 1)
            b_a = tl.exp(tl.load(tensor(table_ptr, count + slot, tl.float32) + t) - b_lse)
            b_o_low, b_o_high = load_row(tensor(table_ptr, slot, dtype), t, low, high, C, live & exists)
            b_h_low += b_a[:, None] * b_o_low
            b_h_high += b_a[:, None] * b_o_high
    # weight ⊙ RMS(h)
    b_rstd = tl.rsqrt((tl.sum(b_h_low * b_h_low, 1) + tl.sum(b_h_high * b_h_high, 1)) / C + eps)[:, None]
    b_w_low = tl.load(weight_ptr + low, mask=low < C, other=0.0).to(tl.float32)[None, :]
    b_w_high = tl.load(weight_ptr + high, mask=high < C, other=0.0).to(tl.float32)[None, :]
    store_row(normed_ptr, t, low, high, C, live, b_h_low * b_rstd * b_w_low, b_h_high * b_rstd * b_w_high)


@triton.jit
def _written(s_ptrs, b_past, betas, i, k: tl.constexpr, token, c, C: tl.constexpr, POLICY: tl.constexpr):
    """Stream k before this junction [1, BLOCK]: as it is stored, and the writes since repeated."""
    b_s = row(s_ptrs[k] + token * C, c, C, POLICY)
    for d in tl.static_range(len(b_past)):
        b_s = lerp(b_s, b_past[d], pick(betas[d], i, k))
    return b_s


@triton.jit
def _past(f_ptrs, token, c, C: tl.constexpr, POLICY: tl.constexpr):
    """The updates since the streams were stored, each [1, BLOCK]."""
    b_rows = ()
    for d in tl.static_range(len(f_ptrs)):
        b_rows = b_rows + (row(f_ptrs[d] + token * C, c, C, POLICY),)
    return b_rows


@triton.jit
def gate_norm_kernel(
    s_ptrs, past_f_ptrs, past_beta_ptrs, f_ptr, w1_ptr, bias_ptr, w2_ptr, weight_ptr, normed_ptr, after_ptrs, beta_ptr,
    eps, key_eps, per_width, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
    LANES: tl.constexpr, COMPETITIVE: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One token. As the forward kernel of `multi_gate`, but h stays in registers until it is normed.

    The streams are those of some junctions ago, whose updates and β are given; they are written if STORE, else β is.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ROWS)
    live = i < N
    row_ptr = f_ptr + token * C
    betas = ()
    for d in tl.static_range(len(past_beta_ptrs)):
        betas = betas + (scalars(past_beta_ptrs[d] + token * N, i, N),)
    # first sweep: the 4N + 2 dot products of s, f, w1 and w2
    ss, sf = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    s1, s2 = ss, sf
    ff, f2 = tl.zeros([1, LANES], tl.float32), tl.zeros([1, LANES], tl.float32)
    for tile in range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_f, b_w1, b_w2 = row(row_ptr, c, C, "evict_last"), vector(w1_ptr, c, C), vector(w2_ptr, c, C)
        b_past = _past(past_f_ptrs, token, c, C, "evict_last")
        for k in tl.static_range(N):
            b_s = _written(s_ptrs, b_past, betas, i, k, token, c, C, "evict_last")  # [1, BLOCK]
            ss, sf = put(ss, i, k, fold(b_s * b_s, LANES)), put(sf, i, k, fold(b_s * b_f, LANES))
            s1, s2 = put(s1, i, k, fold(b_s * b_w1, LANES)), put(s2, i, k, fold(b_s * b_w2, LANES))
        ff, f2 = ff + fold(b_f * b_f, LANES), f2 + fold(b_f * b_w2, LANES)
    ss, sf, s1, s2 = tl.reduce((ss, sf, s1, s2), 1, add4)  # each [ROWS]
    ff, f2 = tl.reduce((ff, f2), 1, add2)  # each [1]
    # β from w1 · RMS(s), then a from w2 · RMS(s')
    beta = gates(s1 * tl.rsqrt(ss * per_width + key_eps) * per_root, bias_ptr, i, live, COMPETITIVE)
    _, _, a = pooling(beta, ss, sf, s2, ff, f2, live, key_eps, per_width, per_root)
    if not STORE:
        tl.store(beta_ptr + token * N + i, beta, mask=live)

    # second sweep: s' = s + β(f − s), h = Σ a s'
    b_tiles, b_square = (), tl.zeros([1, LANES], tl.float32)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_f = row(row_ptr, c, C, "evict_first")
        b_past = _past(past_f_ptrs, token, c, C, "evict_first")
        b_h = tl.zeros([1, BLOCK], tl.float32)
        for k in tl.static_range(N):
            b_s = _written(s_ptrs, b_past, betas, i, k, token, c, C, "evict_first")
            b_s = lerp(b_s, b_f, pick(beta, i, k))
            b_h += pick(a, i, k) * b_s
            if STORE:
                after_ptr = after_ptrs[k] + token * C
                tl.store(after_ptr + c, b_s.to(after_ptr.dtype.element_ty), mask=c < C)
        b_tiles = b_tiles + (b_h,)
        b_square += fold(b_h * b_h, LANES)
    # weight ⊙ RMS(h)
    rstd = tl.rsqrt(tl.sum(tl.sum(b_square, 1), 0) * per_width + eps)
    for tile in tl.static_range(TILES):
        c = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
        b_normed = b_tiles[tile] * rstd * vector(weight_ptr, c, C)
        tl.store(normed_ptr + token * C + c, b_normed.to(normed_ptr.dtype.element_ty), mask=c < C)
