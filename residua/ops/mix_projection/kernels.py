"""Anchor mixing on the GPU: one head of a tile of ROWS tokens at a time, mixed, normalised, turned and written.

    m = λ1 γ1 ⊙ N(a) + λ2 γ2 ⊙ s,   y = rotate(gain ⊙ RMS(m))

Each part can be absent: mixing (MIXED), γ (DYNAMIC), the anchor's own norm N (ANCHOR_NORMED), QK-norm (NORMED) and
rotation (TURNED). A head of width D is held as two halves, which the rotation pairs; of an odd D the second half is one
short. The backward pass keeps nothing: m and both 1/rms are computed again from s and a, which it reads anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _halves(pointer, base, lane, first, second, HALF: tl.constexpr):
    at = pointer + base + lane
    x1 = tl.load(at, mask=first, other=0.0).to(tl.float32)
    return x1, tl.load(at + HALF, mask=second, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(pointer, base, lane, first, second, x1, x2, HALF: tl.constexpr):
    at = pointer + base + lane
    tl.store(at, x1.to(pointer.dtype.element_ty), mask=first)
    tl.store(at + HALF, x2.to(pointer.dtype.element_ty), mask=second)


@triton.jit
def _rstd(x1, x2, eps, D: tl.constexpr):
    return tl.rsqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / D + eps)[:, None]


@triton.jit
def forward_kernel(
    current, anchor, own, other, gamma, gain, anchor_gain, cos, sin, out,
    tokens, heads, period, current_stride, anchor_stride, anchor_head, gamma_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    MIXED: tl.constexpr, DYNAMIC: tl.constexpr, ANCHOR_NORMED: tl.constexpr,
    NORMED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """One head of ROWS tokens. `own` is λ2 and `other` λ1 [heads, D]; gamma's two columns are γ1 and γ2."""
    head = tl.program_id(0) % heads
    row = (tl.program_id(0) // heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < tokens)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    low, high = lane < HALF, lane < D - HALF
    m1, m2 = _halves(current, row[:, None] * current_stride + head * D, lane, inside & low, inside & high, HALF)
    if MIXED:
        base = row[:, None] * anchor_stride + head * anchor_head
        a1, a2 = _halves(anchor, base, lane, inside & low, inside & high, HALF)
        l1, l2 = _halves(other, head * D, lane, low, high, HALF)
        k1, k2 = _halves(own, head * D, lane, low, high, HALF)
        if ANCHOR_NORMED:
            w1, w2 = _halves(anchor_gain, 0, lane, low, high, HALF)
            r = _rstd(a1, a2, eps, D)
            a1, a2 = a1 * r * w1, a2 * r * w2
        a1, a2, m1, m2 = a1 * l1, a2 * l2, m1 * k1, m2 * k2
        if DYNAMIC:
            g1 = tl.load(gamma + row * gamma_stride, mask=row < tokens, other=0.0).to(tl.float32)[:, None]
            g2 = tl.load(gamma + row * gamma_stride + 1, mask=row < tokens, other=0.0).to(tl.float32)[:, None]
            a1, a2, m1, m2 = a1 * g1, a2 * g1, m1 * g2, m2 * g2
        m1, m2 = m1 + a1, m2 + a2
    if NORMED:
        w1, w2 = _halves(gain, 0, lane, low, high, HALF)
        r = _rstd(m1, m2, eps, D)
        m1, m2 = m1 * r * w1, m2 * r * w2
    if TURNED:
        angle = (row % period)[:, None] * HALF + lane
        c = tl.load(cos + angle, mask=inside & low, other=0.0)
        s = tl.load(sin + angle, mask=inside & low, other=0.0)
        m1, m2 = m1 * c - m2 * s, m2 * c + m1 * s
    _store_halves(out, (row[:, None] * heads + head) * D, lane, inside & low, inside & high, m1, m2, HALF)


@triton.jit
def backward_kernel(
    dy, current, anchor, later, own, other, gamma, gain, anchor_gain, cos, sin,
    d_current, d_anchor, d_gamma, partial,
    tokens, heads, length, period, dy_batch, dy_token, dy_head, current_stride, d_current_stride,
    anchor_stride, anchor_head, gamma_stride, partial_stride, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
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
    head = tl.program_id(0) % heads
    chunk = tl.program_id(0) // heads
    lane = tl.arange(0, LANES)[None, :]
    low, high = lane < HALF, lane < D - HALF
    zero = tl.zeros([ROWS, LANES], tl.float32)
    p1, p2, q1, q2, v1, v2, u1, u2 = zero, zero, zero, zero, zero, zero, zero, zero
    for tile in range(chunk, tl.cdiv(tokens, ROWS), tl.num_programs(0) // heads):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < tokens)[:, None]
        first, second = inside & low, inside & high
        base = (row // length * dy_batch + row % length * dy_token)[:, None] + head * dy_head
        d1, d2 = _halves(dy, base, lane, first, second, HALF)
        s1, s2 = _halves(current, row[:, None] * current_stride + head * D, lane, first, second, HALF)
        m1, m2 = s1, s2
        if MIXED:
            base = row[:, None] * anchor_stride + head * anchor_head
            a1, a2 = _halves(anchor, base, lane, first, second, HALF)
            l1, l2 = _halves(other, head * D, lane, low, high, HALF)
            k1, k2 = _halves(own, head * D, lane, low, high, HALF)
            if ANCHOR_NORMED:
                w1, w2 = _halves(anchor_gain, 0, lane, low, high, HALF)
                ra = _rstd(a1, a2, eps, D)
                n1, n2 = a1 * ra, a2 * ra
                a1, a2 = n1 * w1, n2 * w2
            if DYNAMIC:
                g1 = tl.load(gamma + row * gamma_stride, mask=row < tokens, other=0.0).to(tl.float32)[:, None]
                g2 = tl.load(gamma + row * gamma_stride + 1, mask=row < tokens, other=0.0).to(tl.float32)[:, None]
                l1, l2, k1, k2 = l1 * g1, l2 * g1, k1 * g2, k2 * g2
            if NORMED:
                m1, m2 = a1 * l1 + s1 * k1, a2 * l2 + s2 * k2

        if TURNED:
            angle = (row % period)[:, None] * HALF + lane
            c = tl.load(cos + angle, mask=first, other=0.0)
            s = tl.load(sin + angle, mask=first, other=0.0)
            d1, d2 = d1 * c + d2 * s, d2 * c - d1 * s
        if NORMED:
            b1, b2 = _halves(gain, 0, lane, low, high, HALF)
            r = _rstd(m1, m2, eps, D)
            m1, m2 = m1 * r, m2 * r
            v1, v2 = v1 + d1 * m1, v2 + d2 * m2
            d1, d2 = d1 * b1, d2 * b2
            mean = ((tl.sum(d1 * m1, 1) + tl.sum(d2 * m2, 1)) / D)[:, None]
            d1, d2 = r * (d1 - m1 * mean), r * (d2 - m2 * mean)

        to = row[:, None] * d_current_stride + head * D
        if MIXED:
            _store_halves(d_current, to, lane, first, second, d1 * k1, d2 * k2, HALF)
            a1, a2, s1, s2 = a1 * d1, a2 * d2, s1 * d1, s2 * d2
            if DYNAMIC:
                # by now l and k hold λγ, and a γ of zero cannot be divided out
                o1, o2 = _halves(other, head * D, lane, low, high, HALF)
                dg1 = tl.sum(a1 * o1, 1) + tl.sum(a2 * o2, 1)
                o1, o2 = _halves(own, head * D, lane, low, high, HALF)
                dg2 = tl.sum(s1 * o1, 1) + tl.sum(s2 * o2, 1)
                at = d_gamma + (row * heads + head) * 2
                tl.store(at, dg1, mask=row < tokens)
                tl.store(at + 1, dg2, mask=row < tokens)
                a1, a2, s1, s2 = a1 * g1, a2 * g1, s1 * g2, s2 * g2
            p1, p2, q1, q2 = p1 + a1, p2 + a2, q1 + s1, q2 + s2
            d1, d2 = d1 * l1, d2 * l2
            if ANCHOR_NORMED:
                u1, u2 = u1 + d1 * n1, u2 + d2 * n2
                d1, d2 = d1 * w1, d2 * w2
                mean = ((tl.sum(d1 * n1, 1) + tl.sum(d2 * n2, 1)) / D)[:, None]
                d1, d2 = ra * (d1 - n1 * mean), ra * (d2 - n2 * mean)
            to = (row[:, None] * heads + head) * D
            if LATER:
                e1, e2 = _halves(later, to, lane, first, second, HALF)
                d1, d2 = d1 + e1, d2 + e2
            _store_halves(d_anchor, to, lane, first, second, d1, d2, HALF)
        else:
            _store_halves(d_current, to, lane, first, second, d1, d2, HALF)

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
