"""Triton kernels of decoding. A program holds a whole row of C channels: there are few rows, and time is latency.

So that a junction takes as long as the sum and norm of an additive model, it needs one round of reductions too: the
squared norm of a mixture follows from the dot products of what is mixed.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add5(a0, a1, a2, a3, a4, b0, b1, b2, b3, b4):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _base(base, at, inside, ADD: tl.constexpr):
    """What y is added to."""
    if ADD:
        return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def _sum_of(b, y, at, inside):
    """b + y, rounded as it is stored, in float32."""
    v = tl.load(y + at, mask=inside, other=0.0)
    return (v.to(tl.float32) + b).to(v.dtype).to(tl.float32)


@triton.jit
def add_norm_kernel(base, y, weight, normed, h, eps, C: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    inside = c < C
    at = tl.program_id(0).to(tl.int64) * C + c
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    b = _base(base, at, inside, True)
    v = _sum_of(b, y, at, inside)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / C + eps)
    tl.store(h + at, v.to(h.dtype.element_ty), mask=inside)
    tl.store(normed + at, (v * rstd * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def read_partial_kernel(
    o, lse, square, base, y, query, weight, normed, p, eps, key_eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """‖h‖² = (1−t)² ‖o‖² + 2t(1−t) o·p + t² ‖p‖²."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    inside = c < C
    at = row * C + c
    u = tl.load(query + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    finished = tl.load(o + at, mask=inside, other=0.0)
    total, oo = tl.load(lse + row), tl.load(square + row)
    b = _base(base, at, inside, ADD)
    v = _sum_of(b, y, at, inside)
    tl.store(p + at, v.to(p.dtype.element_ty), mask=inside)
    pp, up, op = tl.reduce((v * v, u * v, finished * v), 0, _add3)
    t = tl.sigmoid(up * tl.rsqrt(pp / C + key_eps) - total)
    hh = (1 - t) * (1 - t) * oo + 2 * t * (1 - t) * op + t * t * pp
    rstd = tl.rsqrt(tl.maximum(hh, 0.0) / C + eps)
    h = finished + t * (v - finished)
    tl.store(normed + at, (h * rstd * w).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _pointers(tensors, lanes, dtype: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """The addresses of COUNT tensors from FIRST on, one per lane: rows of different tensors in one tile."""
    address = tl.zeros([COUNT], tl.int64)
    for i in tl.static_range(COUNT):
        address = tl.where(lanes == i, tensors[FIRST + i].to(tl.int64), address)
    pointers = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16])
    return pointers


@triton.jit
def _rows(tensors, lanes, count, at, inside, dtype: tl.constexpr, FIRST: tl.constexpr, TILE: tl.constexpr,
          ALIGNED: tl.constexpr):  # fmt: skip
    """One row of each of TILE tensors from FIRST on, in float32; zero from `count` on."""
    pointers = _pointers(tensors, lanes, dtype, FIRST, TILE, ALIGNED)
    mask = (FIRST + lanes < count)[:, None] & inside[None, :]
    return tl.load(pointers[:, None] + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scores(tile, u, known, key_eps, C: tl.constexpr):
    """u · RMS(v) of the rows v of a tile."""
    dd, ud = tl.reduce((tile * tile, tile * u[None, :]), 1, _add2)
    return tl.where(known, ud * tl.rsqrt(dd / C + key_eps), -float("inf"))


@triton.jit
def _read_tile(tile, u, known, key_eps, C: tl.constexpr):
    """o and its lse where all sources are in one tile: a single round of reductions."""
    z = _scores(tile, u, known, key_eps, C)
    top = tl.max(z, 0)
    e = tl.exp(z - top)
    total = tl.sum(e, 0)
    return tl.sum(e[:, None] * tile, 0) / total, top + tl.log(total)


@triton.jit
def _read_tiles(
    sources, tile, v, u, at, inside, count, key_eps, dtype: tl.constexpr,
    C: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """o and its lse, the finished sources TILE at a time, and then v."""
    lanes = tl.arange(0, TILE)
    top, total, mixed = -float("inf"), 0.0, u * 0
    for start in tl.static_range(0, MOST, TILE):
        if start < count:
            if start > 0:
                tile = _rows(sources, lanes, count, at, inside, dtype, start, TILE, ALIGNED)
            z = _scores(tile, u, start + lanes < count, key_eps, C)
            higher = tl.maximum(top, tl.max(z, 0))
            e, keep = tl.exp(z - higher), tl.exp(top - higher)
            mixed = mixed * keep + tl.sum(e[:, None] * tile, 0)
            total = total * keep + tl.sum(e, 0)
            top = higher
    vv, uv = tl.reduce((v * v, u * v), 0, _add2)
    z = uv * tl.rsqrt(vv / C + key_eps)
    higher = tl.maximum(top, z)
    e, keep = tl.exp(z - higher), tl.exp(top - higher)
    total = total * keep + e
    return (mixed * keep + e * v) / total, higher + tl.log(total)


@triton.jit(do_not_specialize=["rows", "count"])
def read_sources_kernel(
    sources, base, y, queries, weight, normed, new, o, lse, square, rows, count, eps, key_eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Program (m, s) is read s of row m, of at most MOST finished sources and the newest one."""
    row, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, lanes = tl.arange(0, BLOCK), tl.arange(0, TILE)
    inside = c < C
    at = row * C + c
    tile = _rows(sources, lanes, count, at, inside, y.dtype.element_ty, 0, TILE, ALIGNED)
    u = tl.load(queries + s * C + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    b = _base(base, at, inside, ADD)
    v = _sum_of(b, y, at, inside)  # on its way while the others are reduced
    if s == 0:
        tl.store(new + at, v.to(new.dtype.element_ty), mask=inside)
    if MOST < TILE:
        tile = tl.where(lanes[:, None] == count, v[None, :], tile)
        mixed, total = _read_tile(tile, u, lanes <= count, key_eps, C)
    else:
        mixed, total = _read_tiles(
            sources, tile, v, u, at, inside, count, key_eps, y.dtype.element_ty, C, MOST, TILE, ALIGNED
        )
    oo = tl.sum(mixed * mixed, 0)
    if s == 0:
        rstd = tl.rsqrt(oo / C + eps)
        tl.store(normed + at, (mixed * rstd * w).to(normed.dtype.element_ty), mask=inside)
    else:
        other = (s - 1) * rows + row
        tl.store(o + other * C + c, mixed, mask=inside)
        tl.store(lse + other, total)
        tl.store(square + other, oo)


@triton.jit
def _gate_betas(ss, s1, bias, forget, live, key_eps, per_root, C: tl.constexpr, COMPETITIVE: tl.constexpr):
    """β from ‖s_i‖² and w1·s_i."""
    z = s1 * tl.rsqrt(ss / C + key_eps) * per_root
    if COMPETITIVE:
        z = tl.where(live, z + bias, -float("inf"))
        top = tl.maximum(tl.max(z, 0), forget)
        e = tl.exp(z - top)
        beta = e / (tl.sum(e, 0) + tl.exp(forget - top))
    else:
        beta = tl.where(live, tl.sigmoid(z + bias), 0.0)
    return beta


@triton.jit
def _pool_weights(ss, sf, s2, ff, f2, beta, live, key_eps, per_root, C: tl.constexpr):
    """a = softmax_i(w2 · RMS(s'_i)/√C) of s'_i = (1 − β_i) s_i + β_i f, from dot products."""
    keep = 1 - beta
    squared = keep * keep * ss + 2 * beta * keep * sf + beta * beta * ff
    z = (keep * s2 + beta * f2) * tl.rsqrt(tl.maximum(squared, 0.0) / C + key_eps) * per_root
    z = tl.where(live, z, -float("inf"))
    e = tl.exp(z - tl.max(z, 0))
    return e / tl.sum(e, 0)


@triton.jit
def _store_streams(after, s, i, at, live, inside, rows, C: tl.constexpr):
    to = i[:, None] * (rows * C).to(tl.int64) + at[None, :]
    tl.store(after + to, s.to(after.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def gate_norm_kernel(
    streams, y, gate_query, gate_bias, pool_query, weight, normed, after, rows, eps, key_eps, per_root,
    C: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COMPETITIVE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """β and a from the 4N + 2 scalars {‖s_i‖², w1·s_i, w2·s_i, s_i·f; ‖f‖², w2·f} of one round of reductions."""
    row = tl.program_id(0).to(tl.int64)
    c, i = tl.arange(0, BLOCK), tl.arange(0, ROWS)
    inside, live = c < C, i < N
    at = row * C + c
    s = _rows(streams, i, N, at, inside, y.dtype.element_ty, 0, ROWS, ALIGNED)
    w1 = tl.load(gate_query + c, mask=inside, other=0.0).to(tl.float32)
    w2 = tl.load(pool_query + c, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    f = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    # the biases too, though they are needed later: a load behind the reductions would be waited for by itself
    bias = tl.load(gate_bias + COMPETITIVE + i, mask=live, other=0.0).to(tl.float32)
    forget = tl.load(gate_bias).to(tl.float32)
    # what f needs alone goes into the first two rows of a fifth sum: a reduction of its own would be another round
    alone = tl.where(i[:, None] == 0, (f * f)[None, :], (f * w2)[None, :])
    ss, sf, s1, s2, alone = tl.reduce((s * s, s * f[None, :], s * w1[None, :], s * w2[None, :], alone), 1, _add5)
    ff, f2 = tl.sum(tl.where(i == 0, alone, 0.0), 0), tl.sum(tl.where(i == 1, alone, 0.0), 0)
    beta = _gate_betas(ss, s1, bias, forget, live, key_eps, per_root, C, COMPETITIVE)
    a = _pool_weights(ss, sf, s2, ff, f2, beta, live, key_eps, per_root, C)
    s = s + beta[:, None] * (f[None, :] - s)
    _store_streams(after, s, i, at, live, inside, rows, C)
    h = tl.sum(a[:, None] * s, 0)
    rstd = tl.rsqrt(tl.sum(h * h, 0) / C + eps)
    tl.store(normed + at, (h * rstd * w).to(normed.dtype.element_ty), mask=inside)
