"""Triton kernels of junctions and the norms after them. Equations and letters are those of `reference.py`.

First come kernels for decoding, where rows are few and latency matters. A program holds a whole row of C channels. To
be as fast as the sum and norm of an additive model, a junction may have only one round of reductions: the squared norm
of a mixture follows from the dot products of its terms. Then come kernels for prompts, which memory limits: each reads
its rows once, in tiles.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import add2, add3, add4, tensor
from residua.ops.depth_attention.kernels import load_row, log_sum_exp, store_row
from residua.ops.multi_gate.kernels import fold, gates, lerp, pick, pooling, put, row, scalars, vector
from residua.ops.multi_gate.kernels_backward import rows


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _base(base_ptr, at, live, ADD: tl.constexpr):
    """The summand of y [BLOCK], or 0."""
    if ADD:
        return tl.load(base_ptr + at, mask=live, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _sum_of(b_base, y_ptr, at, live):
    """base + y [BLOCK] in float32, rounded as it is stored."""
    b_v = tl.load(y_ptr + at, mask=live, other=0.0)
    return (b_v.to(tl.float32) + b_base).to(b_v.dtype).to(tl.float32)


@triton.jit
def add_norm_kernel(base_ptr, y_ptr, weight_ptr, normed_ptr, h_ptr, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    live = c < C
    at = tl.program_id(0).to(tl.int64) * C + c
    b_w = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
    b_base = _base(base_ptr, at, live, True)
    # h = base + y, then weight ⊙ RMS(h)
    b_h = _sum_of(b_base, y_ptr, at, live)
    b_rstd = tl.rsqrt(tl.sum(b_h * b_h, 0) / C + eps)
    tl.store(h_ptr + at, b_h.to(h_ptr.dtype.element_ty), mask=live)
    tl.store(normed_ptr + at, (b_h * b_rstd * b_w).to(normed_ptr.dtype.element_ty), mask=live)


@triton.jit
def read_partial_kernel(
    o_ptr, lse_ptr, square_ptr, base_ptr, y_ptr, u_ptr, weight_ptr, normed_ptr, p_ptr, eps, key_eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """‖h‖² = (1−t)² ‖o‖² + 2t(1−t) o·p + t² ‖p‖²."""
    m = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    live = c < C
    at = m * C + c
    b_u = tl.load(u_ptr + c, mask=live, other=0.0)  # [BLOCK]
    b_w = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
    b_o = tl.load(o_ptr + at, mask=live, other=0.0)
    lse, oo = tl.load(lse_ptr + m), tl.load(square_ptr + m)
    b_base = _base(base_ptr, at, live, ADD)
    # p = y or base + y
    b_p = _sum_of(b_base, y_ptr, at, live)
    tl.store(p_ptr + at, b_p.to(p_ptr.dtype.element_ty), mask=live)
    pp, up, op = tl.reduce((b_p * b_p, b_u * b_p, b_o * b_p), 0, add3)
    # t = sigmoid(u · RMS(p) − lse)
    t = tl.sigmoid(up * tl.rsqrt(pp / C + key_eps) - lse)
    hh = (1 - t) * (1 - t) * oo + 2 * t * (1 - t) * op + t * t * pp
    # h = o + t (p − o), then weight ⊙ RMS(h)
    rstd = tl.rsqrt(tl.maximum(hh, 0.0) / C + eps)
    b_h = b_o + t * (b_p - b_o)
    tl.store(normed_ptr + at, (b_h * rstd * b_w).to(normed_ptr.dtype.element_ty), mask=live)


@triton.jit
def _pointers(x_ptrs, lanes, dtype: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointers of COUNT tensors from FIRST on, one per lane, so that one tile holds rows of different tensors."""
    address = tl.zeros([COUNT], tl.int64)
    for i in tl.static_range(COUNT):
        address = tl.where(lanes == i, x_ptrs[FIRST + i].to(tl.int64), address)
    pointers = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16])
    return pointers


@triton.jit
def _rows(x_ptrs, lanes, count, at, live, dtype: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """One row of each of TILE tensors from FIRST on, [TILE, BLOCK] in float32; zero from `count` on."""
    pointers = _pointers(x_ptrs, lanes, dtype, FIRST, TILE, ALIGNED)
    mask = (FIRST + lanes < count)[:, None] & live[None, :]
    return tl.load(pointers[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scores(b_v, b_u, known, key_eps, C: tl.constexpr):
    """z = u · RMS(v) [TILE] of the rows v of a tile."""
    dd, ud = tl.reduce((b_v * b_v, b_v * b_u[None, :]), 1, add2)
    return tl.where(known, ud * tl.rsqrt(dd / C + key_eps), -float("inf"))


@triton.jit
def _read_tile(b_v, b_u, known, key_eps, C: tl.constexpr):
    """o = Σ softmax(z)_i v_i [BLOCK] and its lse, all sources in one tile: a single round of reductions."""
    b_z = _scores(b_v, b_u, known, key_eps, C)
    top = tl.max(b_z, 0)
    b_e = tl.exp(b_z - top)
    total = tl.sum(b_e, 0)
    return tl.sum(b_e[:, None] * b_v, 0) / total, top + tl.log(total)


@triton.jit
def _read_tiles(
    v_ptrs, b_tile, b_v, b_u, at, live, count, key_eps, dtype: tl.constexpr,
    C: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """o [BLOCK] and its lse: the finished sources TILE at a time, then v."""
    lanes = tl.arange(0, TILE)
    top, total, b_o = -float("inf"), 0.0, b_u * 0
    for start in tl.static_range(0, MOST, TILE):
        if start < count:
            if start > 0:
                b_tile = _rows(v_ptrs, lanes, count, at, live, dtype, start, TILE, ALIGNED)
            b_z = _scores(b_tile, b_u, start + lanes < count, key_eps, C)
            # online softmax over the tiles
            higher = tl.maximum(top, tl.max(b_z, 0))
            b_e, keep = tl.exp(b_z - higher), tl.exp(top - higher)
            b_o = b_o * keep + tl.sum(b_e[:, None] * b_tile, 0)
            total = total * keep + tl.sum(b_e, 0)
            top = higher
    # and the newest source v
    vv, uv = tl.reduce((b_v * b_v, b_u * b_v), 0, add2)
    b_z = uv * tl.rsqrt(vv / C + key_eps)
    higher = tl.maximum(top, b_z)
    b_e, keep = tl.exp(b_z - higher), tl.exp(top - higher)
    total = total * keep + b_e
    return (b_o * keep + b_e * b_v) / total, higher + tl.log(total)


@triton.jit(do_not_specialize=["rows", "count"])
def read_sources_kernel(
    v_ptrs, base_ptr, y_ptr, u_ptr, weight_ptr, normed_ptr, v_ptr, o_ptr, lse_ptr, square_ptr,
    rows, count, eps, key_eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (m, s) is read s of row m, of at most MOST finished sources and the newest one."""
    m, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, lanes = tl.arange(0, BLOCK), tl.arange(0, TILE)
    live = c < C
    at = m * C + c
    b_tile = _rows(v_ptrs, lanes, count, at, live, y_ptr.dtype.element_ty, 0, TILE, ALIGNED)  # [TILE, BLOCK]
    b_u = tl.load(u_ptr + s * C + c, mask=live, other=0.0)
    b_w = tl.load(weight_ptr + c, mask=live, other=0.0).to(tl.float32)
    b_base = _base(base_ptr, at, live, ADD)
    b_v = _sum_of(b_base, y_ptr, at, live)  # in flight while the others are reduced
    if s == 0:
        tl.store(v_ptr + at, b_v.to(v_ptr.dtype.element_ty), mask=live)
    # o_s = Σ_i softmax(z_s)_i v_i and lse_s
    if MOST < TILE:
        b_tile = tl.where(lanes[:, None] == count, b_v[None, :], b_tile)
        b_o, lse = _read_tile(b_tile, b_u, lanes <= count, key_eps, C)
    else:
        b_o, lse = _read_tiles(
            v_ptrs, b_tile, b_v, b_u, at, live, count, key_eps, y_ptr.dtype.element_ty, C, MOST, TILE, ALIGNED
        )
    # read 0 is a sublayer's input, weight ⊙ RMS(o); the others are stored as o, lse and ‖o‖²
    oo = tl.sum(b_o * b_o, 0)
    if s == 0:
        rstd = tl.rsqrt(oo / C + eps)
        tl.store(normed_ptr + at, (b_o * rstd * b_w).to(normed_ptr.dtype.element_ty), mask=live)
    else:
        other = (s - 1) * rows + m
        tl.store(o_ptr + other * C + c, b_o, mask=live)
        tl.store(lse_ptr + other, lse)
        tl.store(square_ptr + other, oo)


@triton.jit
def _gate_betas(ss, s1, b_bias, forget, live, key_eps, per_root, C: tl.constexpr, COMPETITIVE: tl.constexpr):
    """β [ROWS] from ss = ‖s_i‖² and s1 = w1·s_i."""
    b_z = s1 * tl.rsqrt(ss / C + key_eps) * per_root
    if COMPETITIVE:
        b_z = tl.where(live, b_z + b_bias, -float("inf"))
        top = tl.maximum(tl.max(b_z, 0), forget)
        b_e = tl.exp(b_z - top)
        beta = b_e / (tl.sum(b_e, 0) + tl.exp(forget - top))
    else:
        beta = tl.where(live, tl.sigmoid(b_z + b_bias), 0.0)
    return beta


@triton.jit
def _pool_weights(ss, sf, s2, ff, f2, beta, live, key_eps, per_root, C: tl.constexpr):
    """a = softmax_i(w2 · RMS(s'_i)/√C) of s'_i = (1 − β_i) s_i + β_i f, from dot products."""
    keep = 1 - beta
    squared = keep * keep * ss + 2 * beta * keep * sf + beta * beta * ff
    b_z = (keep * s2 + beta * f2) * tl.rsqrt(tl.maximum(squared, 0.0) / C + key_eps) * per_root
    b_z = tl.where(live, b_z, -float("inf"))
    b_e = tl.exp(b_z - tl.max(b_z, 0))
    return b_e / tl.sum(b_e, 0)


@triton.jit
def _store_streams(after_ptr, b_s, i, at, live, is_channel, rows, C: tl.constexpr):
    to = i[:, None] * (rows * C).to(tl.int64) + at[None, :]
    tl.store(after_ptr + to, b_s.to(after_ptr.dtype.element_ty), mask=live[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=["rows"])
def gate_norm_kernel(
    s_ptrs, f_ptr, w1_ptr, bias_ptr, w2_ptr, weight_ptr, normed_ptr, after_ptr, rows, eps, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COMPETITIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """β and a from the 4N + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f; ‖f‖², w2·f} of one round of reductions."""
    m = tl.program_id(0).to(tl.int64)
    c, i = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    is_channel, live = c < C, i < N
    at = m * C + c
    b_s = _rows(s_ptrs, i, N, at, is_channel, f_ptr.dtype.element_ty, 0, ROWS, ALIGNED)  # [ROWS, BLOCK]
    b_w1 = tl.load(w1_ptr + c, mask=is_channel, other=0.0).to(tl.float32)
    b_w2 = tl.load(w2_ptr + c, mask=is_channel, other=0.0).to(tl.float32)
    b_w = tl.load(weight_ptr + c, mask=is_channel, other=0.0).to(tl.float32)
    b_f = tl.load(f_ptr + at, mask=is_channel, other=0.0).to(tl.float32)  # [BLOCK]
    # the biases too, though they are needed later: a load after the reductions would add its own latency
    b_bias = tl.load(bias_ptr + COMPETITIVE + i, mask=live, other=0.0).to(tl.float32)
    forget = tl.load(bias_ptr).to(tl.float32)
    # ‖f‖² and w2·f are the first two rows of a fifth sum: a reduction of their own would be another round
    b_alone = tl.where(i[:, None] == 0, (b_f * b_f)[None, :], (b_f * b_w2)[None, :])
    ss, sf, s1, s2, b_alone = tl.reduce(
        (b_s * b_s, b_s * b_f[None, :], b_s * b_w1[None, :], b_s * b_w2[None, :], b_alone), 1, _add5
    )
    ff, f2 = tl.sum(tl.where(i == 0, b_alone, 0.0), 0), tl.sum(tl.where(i == 1, b_alone, 0.0), 0)
    # β, a
    beta = _gate_betas(ss, s1, b_bias, forget, live, key_eps, per_root, C, COMPETITIVE)
    a = _pool_weights(ss, sf, s2, ff, f2, beta, live, key_eps, per_root, C)
    # s' = s + β(f − s), h = Σ a s', then weight ⊙ RMS(h)
    b_s = b_s + beta[:, None] * (b_f[None, :] - b_s)
    _store_streams(after_ptr, b_s, i, at, live, is_channel, rows, C)
    b_h = tl.sum(a[:, None] * b_s, 0)
    rstd = tl.rsqrt(tl.sum(b_h * b_h, 0) / C + eps)
    tl.store(normed_ptr + at, (b_h * rstd * b_w).to(normed_ptr.dtype.element_ty), mask=is_channel)


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
def gate_norm_tiles_kernel(
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
        b_past = rows(past_f_ptrs, token, c, C, "evict_last")
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
        b_past = rows(past_f_ptrs, token, c, C, "evict_first")
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
