"""Anchor mixing on the GPU: one head of tiles of ROWS tokens of a sequence, mixed, normalised, turned and written.

    m = λ1 γ1 ⊙ N(a) + λ2 γ2 ⊙ s,   y = rotate(gain ⊙ RMS(m))

Each part can be absent: mixing (MIXED), γ (DYNAMIC), the anchor's own norm N (ANCHOR_NORMED), QK-norm (NORMED) and
rotation (TURNED). A head of width D is held as two halves, which the rotation pairs; of an odd D the second half is one
short. The backward pass keeps nothing: m and both 1/rms are computed again from s and a, which it reads anyway. A
program stays with one head, whose scales and gains it reads once; where a tile begins is worked out once for its rows.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pointer, first, stride, head, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Where one head of ROWS tokens lies, `first` the first token and `stride` from one to the next."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return pointer + (tl.cast(first, tl.int64) * stride + head) + (row * stride + lane)


@triton.jit
def _load(at, low, high, HALF: tl.constexpr):
    x1 = tl.load(at, mask=low, other=0.0).to(tl.float32)
    return x1, tl.load(at + HALF, mask=high, other=0.0).to(tl.float32)


@triton.jit
def _store(at, low, high, x1, x2, HALF: tl.constexpr):
    tl.store(at, x1.to(at.dtype.element_ty), mask=low)
    tl.store(at + HALF, x2.to(at.dtype.element_ty), mask=high)


@triton.jit
def _rstd(x1, x2, eps, D: tl.constexpr):
    return tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]


@triton.jit
def _factors(gamma, first, stride, inside, ROWS: tl.constexpr):
    """γ1 and γ2 of ROWS tokens."""
    at = gamma + tl.cast(first, tl.int64) * stride + (tl.arange(0, ROWS) * stride)[:, None]
    g1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return g1, tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "turns"])
def forward_kernel(
    current, anchor, own, other, gamma, gain, anchor_gain, cos, sin, out,
    batches, length, tiles, turns, heads, current_stride, anchor_stride, anchor_head, gamma_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    MIXED: tl.constexpr, DYNAMIC: tl.constexpr, ANCHOR_NORMED: tl.constexpr,
    NORMED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One head of every P-th tile, P the programs of a head. `own` is λ2 and `other` λ1 [heads, D]; gamma's two columns
    are γ1 and γ2; the table of the next sequence is `turns` tokens further, 0 if all share one.
    """
    head, chunk, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.num_programs(0) // heads
    lane = tl.arange(0, LANES)[None, :]
    low, high = lane < HALF, lane < D - HALF
    if MIXED:
        l1, l2 = _load(other + head * D + lane, low, high, HALF)
        k1, k2 = _load(own + head * D + lane, low, high, HALF)
    if ANCHOR_NORMED:
        w1, w2 = _load(anchor_gain + lane, low, high, HALF)
    if NORMED:
        b1, b2 = _load(gain + lane, low, high, HALF)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        token = tl.cast(batch, tl.int64) * length + start
        inside = (start + tl.arange(0, ROWS) < length)[:, None]
        first, second = inside & low, inside & high
        m1, m2 = _load(_tile(current, token, current_stride, head * D, LANES, ROWS), first, second, HALF)
        if MIXED:
            at = _tile(anchor, token, anchor_stride, head * anchor_head, LANES, ROWS)
            a1, a2 = _load(at, first, second, HALF)
            if ANCHOR_NORMED:
                r = _rstd(a1, a2, eps, D)
                a1, a2 = a1 * r * w1, a2 * r * w2
            a1, a2, m1, m2 = a1 * l1, a2 * l2, m1 * k1, m2 * k2
            if DYNAMIC:
                g1, g2 = _factors(gamma, token, gamma_stride, inside, ROWS)
                a1, a2, m1, m2 = a1 * g1, a2 * g1, m1 * g2, m2 * g2
            m1, m2 = m1 + a1, m2 + a2
        if NORMED:
            r = _rstd(m1, m2, eps, D)
            m1, m2 = m1 * r * b1, m2 * r * b2
        if TURNED:
            turn = batch * turns + start
            c = tl.load(_tile(cos, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            s = tl.load(_tile(sin, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            m1, m2 = m1 * c - m2 * s, m2 * c + m1 * s
        _store(_tile(out, token, heads * D, head * D, LANES, ROWS), first, second, m1, m2, HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "turns"])
def backward_kernel(
    dy, current, anchor, later, own, other, gamma, gain, anchor_gain, cos, sin,
    d_current, d_anchor, d_gamma, partial,
    batches, length, tiles, turns, heads, dy_batch, dy_token, dy_head, current_stride, d_current_stride,
    anchor_stride, anchor_head, gamma_stride, partial_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    MIXED: tl.constexpr, DYNAMIC: tl.constexpr, ANCHOR_NORMED: tl.constexpr,
    NORMED: tl.constexpr, TURNED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """One head of every P-th tile of tokens, P the programs of a head. With n = m·rstd and dz = dy turned back:

    d_gain = Σ dz ⊙ n,  dm = rstd (gain ⊙ dz − n mean(gain ⊙ dz ⊙ n)),  ds = λ2 γ2 ⊙ dm,  dN(a) = λ1 γ1 ⊙ dm
    dλ1 = Σ γ1 dm ⊙ N(a),  dλ2 = Σ γ2 dm ⊙ s,  dγ1 = Σ λ1 ⊙ dm ⊙ N(a),  dγ2 = Σ λ2 ⊙ dm ⊙ s

    `later` is what later layers gave the anchor as its gradient; the sum is written. dγ is left per head. The sums over
    tokens stay per row of the tile until the end, when each program writes them, up to four [heads, D], into its own
    row of `partial`: a reduction across warps in every turn would cost more than the traffic.
    """
    head, chunk, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.num_programs(0) // heads
    lane = tl.arange(0, LANES)[None, :]
    low, high = lane < HALF, lane < D - HALF
    zero = tl.zeros([ROWS, LANES], tl.float32)
    p1, p2, q1, q2, v1, v2, u1, u2 = zero, zero, zero, zero, zero, zero, zero, zero
    if MIXED:
        o1, o2 = _load(other + head * D + lane, low, high, HALF)
        i1, i2 = _load(own + head * D + lane, low, high, HALF)
    if ANCHOR_NORMED:
        w1, w2 = _load(anchor_gain + lane, low, high, HALF)
    if NORMED:
        b1, b2 = _load(gain + lane, low, high, HALF)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        token = tl.cast(batch, tl.int64) * length + start
        inside = (start + tl.arange(0, ROWS) < length)[:, None]
        first, second = inside & low, inside & high
        given = dy + (tl.cast(batch, tl.int64) * dy_batch)
        d1, d2 = _load(_tile(given, start, dy_token, head * dy_head, LANES, ROWS), first, second, HALF)
        s1, s2 = _load(_tile(current, token, current_stride, head * D, LANES, ROWS), first, second, HALF)
        m1, m2 = s1, s2
        if MIXED:
            at = _tile(anchor, token, anchor_stride, head * anchor_head, LANES, ROWS)
            a1, a2 = _load(at, first, second, HALF)
            l1, l2, k1, k2 = o1, o2, i1, i2
            if ANCHOR_NORMED:
                ra = _rstd(a1, a2, eps, D)
                n1, n2 = a1 * ra, a2 * ra
                a1, a2 = n1 * w1, n2 * w2
            if DYNAMIC:
                g1, g2 = _factors(gamma, token, gamma_stride, inside, ROWS)
                l1, l2, k1, k2 = l1 * g1, l2 * g1, k1 * g2, k2 * g2
            if NORMED:
                m1, m2 = a1 * l1 + s1 * k1, a2 * l2 + s2 * k2

        if TURNED:
            turn = batch * turns + start
            c = tl.load(_tile(cos, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            s = tl.load(_tile(sin, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            d1, d2 = d1 * c + d2 * s, d2 * c - d1 * s
        if NORMED:
            r = _rstd(m1, m2, eps, D)
            m1, m2 = m1 * r, m2 * r
            v1, v2 = v1 + d1 * m1, v2 + d2 * m2
            d1, d2 = d1 * b1, d2 * b2
            mean = ((tl.sum(d1 * m1, 1) + tl.sum(d2 * m2, 1)) / D)[:, None]
            d1, d2 = r * (d1 - m1 * mean), r * (d2 - m2 * mean)

        to = _tile(d_current, token, d_current_stride, head * D, LANES, ROWS)
        if MIXED:
            _store(to, first, second, d1 * k1, d2 * k2, HALF)
            a1, a2, s1, s2 = a1 * d1, a2 * d2, s1 * d1, s2 * d2
            if DYNAMIC:
                dg1 = tl.sum(a1 * o1, 1) + tl.sum(a2 * o2, 1)
                dg2 = tl.sum(s1 * i1, 1) + tl.sum(s2 * i2, 1)
                at = d_gamma + (token * heads + head) * 2 + (tl.arange(0, ROWS) * heads * 2)[:, None]
                tl.store(at, dg1[:, None], mask=inside)
                tl.store(at + 1, dg2[:, None], mask=inside)
                a1, a2, s1, s2 = a1 * g1, a2 * g1, s1 * g2, s2 * g2
            p1, p2, q1, q2 = p1 + a1, p2 + a2, q1 + s1, q2 + s2
            d1, d2 = d1 * l1, d2 * l2
            if ANCHOR_NORMED:
                u1, u2 = u1 + d1 * n1, u2 + d2 * n2
                d1, d2 = d1 * w1, d2 * w2
                mean = ((tl.sum(d1 * n1, 1) + tl.sum(d2 * n2, 1)) / D)[:, None]
                d1, d2 = ra * (d1 - n1 * mean), ra * (d2 - n2 * mean)
            if LATER:
                e1, e2 = _load(_tile(later, token, heads * D, head * D, LANES, ROWS), first, second, HALF)
                d1, d2 = d1 + e1, d2 + e2
            _store(_tile(d_anchor, token, heads * D, head * D, LANES, ROWS), first, second, d1, d2, HALF)
        else:
            _store(to, first, second, d1, d2, HALF)

    at = partial + chunk * partial_stride + head * D
    if MIXED:
        _store_sums(at, lane, low, high, p1, p2, HALF)
        _store_sums(at + heads * D, lane, low, high, q1, q2, HALF)
        at += 2 * heads * D
    if NORMED:
        _store_sums(at, lane, low, high, v1, v2, HALF)
        at += heads * D
    if ANCHOR_NORMED:
        _store_sums(at, lane, low, high, u1, u2, HALF)


@triton.jit
def _store_sums(at, lane, low, high, x1, x2, HALF: tl.constexpr):
    tl.store(at + lane, tl.sum(x1, 0)[None, :], mask=low)
    tl.store(at + HALF + lane, tl.sum(x2, 0)[None, :], mask=high)
