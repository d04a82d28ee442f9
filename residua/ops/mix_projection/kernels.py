"""Anchor mixing on the GPU: one head of tiles of ROWS tokens of a sequence, mixed, normalised, rotated and written.

    m = λ1 γ1 ⊙ N(a) + λ2 γ2 ⊙ s,   y = rotate(gain ⊙ RMS(m))

Each part can be absent: mixing (MIXED), γ (DYNAMIC), the anchor's own norm N (ANCHOR_NORMED), QK-norm (NORMED) and
rotation (TURNED). FOLDED: s holds λ2 ⊙ s. GATED: y = o ⊙ σ(m), with o attention's output (`anchor_gradients.py`). A
head of width D is held as two halves [ROWS, LANES], which the rotation pairs (b_x1, b_x2); if D is odd, the second half
is one short. The forward pass stores nothing: backward recomputes m and both 1/rms from s and a, which it reads anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


@triton.jit
def _tile(x_ptr, first, stride_t, head, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Pointers to the first half of one head of ROWS tokens, from token `first` on; `head` is the head's offset."""
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    return x_ptr + (tl.cast(first, tl.int64) * stride_t + head) + (row * stride_t + lane)


@triton.jit
def _load(x_ptr, is_low, is_high, HALF: tl.constexpr):
    b_x1 = tl.load(x_ptr, mask=is_low, other=0.0).to(tl.float32)
    return b_x1, tl.load(x_ptr + HALF, mask=is_high, other=0.0).to(tl.float32)


@triton.jit
def _store(x_ptr, is_low, is_high, b_x1, b_x2, HALF: tl.constexpr):
    tl.store(x_ptr, b_x1.to(x_ptr.dtype.element_ty), mask=is_low)
    tl.store(x_ptr + HALF, b_x2.to(x_ptr.dtype.element_ty), mask=is_high)


@triton.jit
def _rstd(b_x1, b_x2, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / D + eps)[:, None]


@triton.jit
def _factors(gamma_ptr, first, stride_t, live, ROWS: tl.constexpr):
    """γ1 and γ2 of ROWS tokens, [ROWS, 1] each."""
    at_ptr = gamma_ptr + tl.cast(first, tl.int64) * stride_t + (tl.arange(0, ROWS) * stride_t)[:, None]
    b_g1 = tl.load(at_ptr, mask=live, other=0.0).to(tl.float32)
    return b_g1, tl.load(at_ptr + 1, mask=live, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "turns"])
def forward_kernel(
    s_ptr, a_ptr, own_ptr, other_ptr, gamma_ptr, gain_ptr, anchor_gain_ptr, cos_ptr, sin_ptr, o_ptr, y_ptr,
    batches, length, tiles, turns, heads, stride_st, stride_at, stride_ah, stride_gt, stride_ob, stride_ot, stride_oh,
    eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    MIXED: tl.constexpr, FOLDED: tl.constexpr, DYNAMIC: tl.constexpr, ANCHOR_NORMED: tl.constexpr,
    NORMED: tl.constexpr, TURNED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """One head of every P-th tile, P the programs of a head, whose scales and gains it reads once. own is λ2 and other
    λ1, [heads, D]; gamma's two columns are γ1 and γ2; the table of the next sequence is `turns` tokens further on, 0 if
    all share one.
    """
    head, chunk, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.num_programs(0) // heads
    lane = tl.arange(0, LANES)[None, :]
    is_low, is_high = lane < HALF, lane < D - HALF
    if MIXED:
        b_l1, b_l2 = _load(other_ptr + head * D + lane, is_low, is_high, HALF)  # λ1 [1, LANES]
        if not FOLDED:
            b_k1, b_k2 = _load(own_ptr + head * D + lane, is_low, is_high, HALF)  # λ2
    if ANCHOR_NORMED:
        b_w1, b_w2 = _load(anchor_gain_ptr + lane, is_low, is_high, HALF)
    if NORMED:
        b_b1, b_b2 = _load(gain_ptr + lane, is_low, is_high, HALF)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        token = tl.cast(batch, tl.int64) * length + start
        live = (start + tl.arange(0, ROWS) < length)[:, None]
        first, second = live & is_low, live & is_high
        # m = λ1 γ1 ⊙ N(a) + λ2 γ2 ⊙ s
        b_m1, b_m2 = _load(_tile(s_ptr, token, stride_st, head * D, LANES, ROWS), first, second, HALF)  # [ROWS, LANES]
        if MIXED:
            at_ptr = _tile(a_ptr, token, stride_at, head * stride_ah, LANES, ROWS)
            b_a1, b_a2 = _load(at_ptr, first, second, HALF)
            if ANCHOR_NORMED:
                b_rstd = _rstd(b_a1, b_a2, eps, D)
                b_a1, b_a2 = b_a1 * b_rstd * b_w1, b_a2 * b_rstd * b_w2
            b_a1, b_a2 = b_a1 * b_l1, b_a2 * b_l2
            if not FOLDED:
                b_m1, b_m2 = b_m1 * b_k1, b_m2 * b_k2
            if DYNAMIC:
                b_g1, b_g2 = _factors(gamma_ptr, token, stride_gt, live, ROWS)
                b_a1, b_a2, b_m1, b_m2 = b_a1 * b_g1, b_a2 * b_g1, b_m1 * b_g2, b_m2 * b_g2
            b_m1, b_m2 = b_m1 + b_a1, b_m2 + b_a2
        if NORMED:
            # gain ⊙ RMS(m)
            b_rstd = _rstd(b_m1, b_m2, eps, D)
            b_m1, b_m2 = b_m1 * b_rstd * b_b1, b_m2 * b_rstd * b_b2
        if TURNED:
            # rotate
            turn = batch * turns + start
            b_cos = tl.load(_tile(cos_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            b_sin = tl.load(_tile(sin_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            b_m1, b_m2 = b_m1 * b_cos - b_m2 * b_sin, b_m2 * b_cos + b_m1 * b_sin
        if GATED:
            # o ⊙ σ(m)
            batch_ptr = o_ptr + (tl.cast(batch, tl.int64) * stride_ob)
            at_ptr = _tile(batch_ptr, start, stride_ot, head * stride_oh, LANES, ROWS)
            b_o1, b_o2 = _load(at_ptr, first, second, HALF)
            b_m1, b_m2 = b_o1 * tl.sigmoid(b_m1), b_o2 * tl.sigmoid(b_m2)
        _store(_tile(y_ptr, token, heads * D, head * D, LANES, ROWS), first, second, b_m1, b_m2, HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "turns"])
def backward_kernel(
    dy_ptr, s_ptr, a_ptr, later_ptr, own_ptr, other_ptr, gamma_ptr, gain_ptr, anchor_gain_ptr, cos_ptr, sin_ptr,
    ds_ptr, da_ptr, d_gamma_ptr, partial_ptr,
    batches, length, tiles, turns, heads, stride_yb, stride_yt, stride_yh, stride_st, stride_dst,
    stride_at, stride_ah, stride_gt, stride_dgt, stride_p, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    MIXED: tl.constexpr, DYNAMIC: tl.constexpr, ANCHOR_NORMED: tl.constexpr, NORMED: tl.constexpr,
    TURNED: tl.constexpr, LATER: tl.constexpr,
):  # fmt: skip
    """One head of every P-th tile of tokens, P the programs of a head. With n = m·rstd and dz = dy rotated back:

        d_gain = Σ dz ⊙ n,  dm = rstd (gain ⊙ dz − n mean(gain ⊙ dz ⊙ n)),  ds = λ2 γ2 ⊙ dm,  dN(a) = λ1 γ1 ⊙ dm
        dλ1 = Σ γ1 dm ⊙ N(a),  dλ2 = Σ γ2 dm ⊙ s,  dγ1 = Σ λ1 ⊙ dm ⊙ N(a),  dγ2 = Σ λ2 ⊙ dm ⊙ s

    later is the anchor's gradient from later layers; da is written with it added. dγ is left per head. The sums over
    tokens stay per row of the tile until the end, when each program writes them, up to four [heads, D], into its own
    row of `partial`: a reduction across warps for every tile would cost more than the memory traffic.
    """
    head, chunk, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.num_programs(0) // heads
    lane = tl.arange(0, LANES)[None, :]
    is_low, is_high = lane < HALF, lane < D - HALF
    b_zero = tl.zeros([ROWS, LANES], tl.float32)
    # sums over tokens of dλ1, dλ2, d_gain and d_anchor_gain
    b_p1, b_p2, b_q1, b_q2, b_v1, b_v2, b_u1, b_u2 = b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero, b_zero
    if MIXED:
        b_o1, b_o2 = _load(other_ptr + head * D + lane, is_low, is_high, HALF)  # λ1 [1, LANES]
        b_i1, b_i2 = _load(own_ptr + head * D + lane, is_low, is_high, HALF)  # λ2
    if ANCHOR_NORMED:
        b_w1, b_w2 = _load(anchor_gain_ptr + lane, is_low, is_high, HALF)
    if NORMED:
        b_b1, b_b2 = _load(gain_ptr + lane, is_low, is_high, HALF)
    for block in tl.range(chunk, batches * tiles, chunks, num_stages=STAGES):
        batch, start = block // tiles, block % tiles * ROWS
        token = tl.cast(batch, tl.int64) * length + start
        live = (start + tl.arange(0, ROWS) < length)[:, None]
        first, second = live & is_low, live & is_high
        batch_ptr = dy_ptr + (tl.cast(batch, tl.int64) * stride_yb)
        b_d1, b_d2 = _load(
            _tile(batch_ptr, start, stride_yt, head * stride_yh, LANES, ROWS), first, second, HALF
        )  # [ROWS, LANES]
        b_s1, b_s2 = _load(_tile(s_ptr, token, stride_st, head * D, LANES, ROWS), first, second, HALF)
        # m = λ1 γ1 ⊙ N(a) + λ2 γ2 ⊙ s, again
        b_m1, b_m2 = b_s1, b_s2
        if MIXED:
            at_ptr = _tile(a_ptr, token, stride_at, head * stride_ah, LANES, ROWS)
            b_a1, b_a2 = _load(at_ptr, first, second, HALF)
            b_l1, b_l2, b_k1, b_k2 = b_o1, b_o2, b_i1, b_i2
            if ANCHOR_NORMED:
                b_rstd_a = _rstd(b_a1, b_a2, eps, D)
                b_n1, b_n2 = b_a1 * b_rstd_a, b_a2 * b_rstd_a
                b_a1, b_a2 = b_n1 * b_w1, b_n2 * b_w2
            if DYNAMIC:
                b_g1, b_g2 = _factors(gamma_ptr, token, stride_gt, live, ROWS)
                b_l1, b_l2, b_k1, b_k2 = b_l1 * b_g1, b_l2 * b_g1, b_k1 * b_g2, b_k2 * b_g2
            if NORMED:
                b_m1, b_m2 = b_a1 * b_l1 + b_s1 * b_k1, b_a2 * b_l2 + b_s2 * b_k2

        if TURNED:
            # dz = dy rotated back
            turn = batch * turns + start
            b_cos = tl.load(_tile(cos_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            b_sin = tl.load(_tile(sin_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            b_d1, b_d2 = b_d1 * b_cos + b_d2 * b_sin, b_d2 * b_cos - b_d1 * b_sin
        if NORMED:
            # d_gain, and dm = rstd (gain ⊙ dz − n mean(gain ⊙ dz ⊙ n))
            b_rstd = _rstd(b_m1, b_m2, eps, D)
            b_m1, b_m2 = b_m1 * b_rstd, b_m2 * b_rstd
            b_v1, b_v2 = b_v1 + b_d1 * b_m1, b_v2 + b_d2 * b_m2
            b_d1, b_d2 = b_d1 * b_b1, b_d2 * b_b2
            b_mean = (tl.sum(b_d1 * b_m1 + b_d2 * b_m2, 1) / D)[:, None]
            b_d1, b_d2 = b_rstd * (b_d1 - b_m1 * b_mean), b_rstd * (b_d2 - b_m2 * b_mean)

        to_ptr = _tile(ds_ptr, token, stride_dst, head * D, LANES, ROWS)
        if MIXED:
            b_a1, b_a2, b_s1, b_s2 = b_a1 * b_d1, b_a2 * b_d2, b_s1 * b_d1, b_s2 * b_d2
        if DYNAMIC:
            # dγ1, dγ2 of this head
            b_dg1, b_dg2 = tl.sum(b_a1 * b_o1 + b_a2 * b_o2, 1), tl.sum(b_s1 * b_i1 + b_s2 * b_i2, 1)
            at_ptr = d_gamma_ptr + token * stride_dgt + head * 2 + (tl.arange(0, ROWS) * stride_dgt)[:, None]
            tl.store(at_ptr, b_dg1[:, None], mask=live)
            tl.store(at_ptr + 1, b_dg2[:, None], mask=live)
        if MIXED:
            # ds = λ2 γ2 ⊙ dm
            _store(to_ptr, first, second, b_d1 * b_k1, b_d2 * b_k2, HALF)
            if DYNAMIC:
                b_a1, b_a2, b_s1, b_s2 = b_a1 * b_g1, b_a2 * b_g1, b_s1 * b_g2, b_s2 * b_g2
            b_p1, b_p2, b_q1, b_q2 = b_p1 + b_a1, b_p2 + b_a2, b_q1 + b_s1, b_q2 + b_s2
            # dN(a) = λ1 γ1 ⊙ dm, then through N, plus what later layers gave
            b_d1, b_d2 = b_d1 * b_l1, b_d2 * b_l2
            if ANCHOR_NORMED:
                b_u1, b_u2 = b_u1 + b_d1 * b_n1, b_u2 + b_d2 * b_n2
                b_d1, b_d2 = b_d1 * b_w1, b_d2 * b_w2
                b_mean = (tl.sum(b_d1 * b_n1 + b_d2 * b_n2, 1) / D)[:, None]
                b_d1, b_d2 = b_rstd_a * (b_d1 - b_n1 * b_mean), b_rstd_a * (b_d2 - b_n2 * b_mean)
            if LATER:
                b_e1, b_e2 = _load(_tile(later_ptr, token, heads * D, head * D, LANES, ROWS), first, second, HALF)
                b_d1, b_d2 = b_d1 + b_e1, b_d2 + b_e2
            _store(_tile(da_ptr, token, heads * D, head * D, LANES, ROWS), first, second, b_d1, b_d2, HALF)
        else:
            _store(to_ptr, first, second, b_d1, b_d2, HALF)

    # this program's row of `partial`
    at_ptr = partial_ptr + chunk * stride_p + head * D
    if MIXED:
        _store_sums(at_ptr, lane, is_low, is_high, b_p1, b_p2, HALF)
        _store_sums(at_ptr + heads * D, lane, is_low, is_high, b_q1, b_q2, HALF)
        at_ptr += 2 * heads * D
    if NORMED:
        _store_sums(at_ptr, lane, is_low, is_high, b_v1, b_v2, HALF)
        at_ptr += heads * D
    if ANCHOR_NORMED:
        _store_sums(at_ptr, lane, is_low, is_high, b_u1, b_u2, HALF)


@triton.jit(do_not_specialize=["batches", "length", "tiles", "turns"])
def folded_backward_kernel(
    dy_ptr, o_ptr, s_ptr, a_ptr, other_ptr, gamma_ptr, gain_ptr, cos_ptr, sin_ptr, do_ptr, ds_ptr, d_gamma_ptr,
    partial_ptr, batches, length, tiles, turns, heads, stride_yb, stride_yt, stride_yh, stride_ob, stride_ot, stride_oh,
    stride_st, stride_dst, stride_at, stride_ah, stride_gt, stride_dgt, stride_p, eps,
    D: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    MIXED: tl.constexpr, DYNAMIC: tl.constexpr, NORMED: tl.constexpr, TURNED: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Every P-th tile of tokens, P the programs, of one section with λ2 inside s; its heads in turn.

    m = γ1 λ1 ⊙ a + γ2 s,  ds = γ2 dm,  dγ1 = Σ λ1 ⊙ dm ⊙ a,  dγ2 = Σ dm ⊙ s;  λ1 and a are left to `gather_kernel`
    GATED: do = dy ⊙ σ(m),  dm = dy ⊙ o ⊙ σ(m) (1 − σ(m));  else dm and d_gain as in `backward_kernel`

    For a section C wide it moves 4C: dy, s, a and ds; GATED 6C: o and do, too. Without γ and norm dm depends on neither
    s nor a: 2C. A tile's angles and γ are read once for all heads. Sums over heads (dγ, d_gain) stay per element, and
    are reduced once for a tile (dγ) or a program (d_gain [D], its row of `partial`).
    """
    lane = tl.arange(0, LANES)[None, :]
    is_low, is_high = lane < HALF, lane < D - HALF
    b_zero = tl.zeros([ROWS, LANES], tl.float32)
    b_v1, b_v2 = b_zero, b_zero  # d_gain, per row of a tile
    if NORMED:
        b_b1, b_b2 = _load(gain_ptr + lane, is_low, is_high, HALF)
    for block in tl.range(tl.program_id(0), batches * tiles, tl.num_programs(0)):
        batch, start = block // tiles, block % tiles * ROWS
        token = tl.cast(batch, tl.int64) * length + start
        live = (start + tl.arange(0, ROWS) < length)[:, None]
        first, second = live & is_low, live & is_high
        dy_at = _tile(dy_ptr + tl.cast(batch, tl.int64) * stride_yb, start, stride_yt, 0, LANES, ROWS)
        o_at = _tile(o_ptr + tl.cast(batch, tl.int64) * stride_ob, start, stride_ot, 0, LANES, ROWS)
        s_at, a_at = _tile(s_ptr, token, stride_st, 0, LANES, ROWS), _tile(a_ptr, token, stride_at, 0, LANES, ROWS)
        ds_at, do_at = _tile(ds_ptr, token, stride_dst, 0, LANES, ROWS), _tile(do_ptr, token, heads * D, 0, LANES, ROWS)
        if TURNED:
            turn = batch * turns + start
            b_cos = tl.load(_tile(cos_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
            b_sin = tl.load(_tile(sin_ptr, turn, HALF, 0, LANES, ROWS), mask=first, other=0.0)
        if DYNAMIC:
            b_g1, b_g2 = _factors(gamma_ptr, token, stride_gt, live, ROWS)
        b_p, b_q = b_zero, b_zero  # dγ1 and dγ2, per lane
        for head in tl.range(0, heads, num_stages=STAGES):
            b_d1, b_d2 = _load(dy_at + head * stride_yh, first, second, HALF)  # [ROWS, LANES]
            if MIXED or NORMED or GATED:
                # m = γ1 λ1 ⊙ a + γ2 s, again
                b_s1, b_s2 = _load(s_at + head * D, first, second, HALF)
                b_m1, b_m2 = b_s1, b_s2
            if MIXED:
                b_l1, b_l2 = _load(other_ptr + head * D + lane, is_low, is_high, HALF)  # [1, LANES]
                b_a1, b_a2 = _load(a_at + head * stride_ah, first, second, HALF)
                b_a1, b_a2 = b_a1 * b_l1, b_a2 * b_l2
                if DYNAMIC:
                    b_m1, b_m2 = b_a1 * b_g1 + b_s1 * b_g2, b_a2 * b_g1 + b_s2 * b_g2
                else:
                    b_m1, b_m2 = b_a1 + b_s1, b_a2 + b_s2
            if GATED:
                # do and dm
                b_o1, b_o2 = _load(o_at + head * stride_oh, first, second, HALF)
                b_m1, b_m2 = tl.sigmoid(b_m1), tl.sigmoid(b_m2)
                b_e1, b_e2 = b_d1 * b_m1, b_d2 * b_m2
                _store(do_at + head * D, first, second, b_e1, b_e2, HALF)
                b_d1, b_d2 = b_e1 * b_o1 * (1 - b_m1), b_e2 * b_o2 * (1 - b_m2)
            if TURNED:
                # dz = dy rotated back
                b_d1, b_d2 = b_d1 * b_cos + b_d2 * b_sin, b_d2 * b_cos - b_d1 * b_sin
            if NORMED:
                # d_gain, and dm = rstd (gain ⊙ dz − n mean(gain ⊙ dz ⊙ n))
                b_rstd = _rstd(b_m1, b_m2, eps, D)
                b_m1, b_m2 = b_m1 * b_rstd, b_m2 * b_rstd
                b_v1, b_v2 = b_v1 + b_d1 * b_m1, b_v2 + b_d2 * b_m2
                b_d1, b_d2 = b_d1 * b_b1, b_d2 * b_b2
                b_mean = (tl.sum(b_d1 * b_m1 + b_d2 * b_m2, 1) / D)[:, None]
                b_d1, b_d2 = b_rstd * (b_d1 - b_m1 * b_mean), b_rstd * (b_d2 - b_m2 * b_mean)
            if DYNAMIC:
                # dγ, and ds = γ2 dm
                b_p, b_q = b_p + b_a1 * b_d1 + b_a2 * b_d2, b_q + b_s1 * b_d1 + b_s2 * b_d2
                b_d1, b_d2 = b_d1 * b_g2, b_d2 * b_g2
            _store(ds_at + head * D, first, second, b_d1, b_d2, HALF)
        if DYNAMIC:
            at_ptr = d_gamma_ptr + token * stride_dgt + (tl.arange(0, ROWS) * stride_dgt)[:, None]
            tl.store(at_ptr, tl.sum(b_p, 1)[:, None], mask=live)
            tl.store(at_ptr + 1, tl.sum(b_q, 1)[:, None], mask=live)
    if NORMED:
        _store_sums(partial_ptr + tl.program_id(0) * stride_p, lane, is_low, is_high, b_v1, b_v2, HALF)


@triton.jit
def _store_sums(at_ptr, lane, is_low, is_high, b_x1, b_x2, HALF: tl.constexpr):
    tl.store(at_ptr + lane, tl.sum(b_x1, 0)[None, :], mask=is_low)
    tl.store(at_ptr + HALF + lane, tl.sum(b_x2, 0)[None, :], mask=is_high)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def factors_kernel(
    d_gamma_ptr, gamma_ptr, hidden_ptr, up_ptr, d_hidden_ptr, quotient_ptr, partial_ptr,
    tokens, tiles, stride_ht, stride_dt,
    FACTORS: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every P-th tile of ROWS tokens, P the programs, of the network that makes γ = σ(z), z = W2 GELU(h) + b:

    dz = γ (1 − γ) dγ,  db = Σ dz,  dW2 = Σ dz GELU(h)ᵀ,  dh = (W2ᵀ dz) ⊙ GELU'(h)

    dγ and γ [tokens, FACTORS]; also the quotients γ1/γ2 for `gather_kernel`, [tokens, FACTORS/2]. Each program leaves
    its share of dW2 [FACTORS, E] and db in its row of `partial`.
    """
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    inside = lane < E
    b_zero, b_none = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, 1], tl.float32)
    b_sums, b_biases = (), ()
    for f in tl.static_range(FACTORS):  # noqa: B007
        b_sums, b_biases = b_sums + (b_zero,), b_biases + (b_none,)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        t = tile * ROWS + row.to(tl.int64)
        live = t < tokens
        b_h = tl.load(hidden_ptr + t * stride_ht + lane, mask=live & inside, other=0.0).to(tl.float32)  # [ROWS, LANES]
        b_below = 0.5 * (1 + tl.erf(b_h * 0.7071067811865476))
        b_active = b_h * b_below
        b_dh = b_zero
        b_new, b_new_biases = (), ()
        for f in tl.static_range(FACTORS):
            b_dz = tl.load(d_gamma_ptr + t * FACTORS + f, mask=live, other=0.0)  # [ROWS, 1]
            b_gamma = tl.load(gamma_ptr + t * FACTORS + f, mask=live, other=0.0).to(tl.float32)
            b_dz *= b_gamma * (1 - b_gamma)
            if f % 2 == 0:
                b_first = b_gamma
            else:
                # with so small a γ2 nothing is left of γ2 dm, and the quotient may overflow
                is_small = b_gamma < 1e-30
                b_quotient = tl.where(is_small, 0.0, b_first / tl.where(is_small, 1.0, b_gamma))
                tl.store(quotient_ptr + t * (FACTORS // 2) + f // 2, b_quotient, mask=live)
            b_dh += b_dz * tl.load(up_ptr + f * E + lane + 0 * row, mask=inside & (row >= 0), other=0.0).to(tl.float32)
            b_new, b_new_biases = b_new + (b_sums[f] + b_dz * b_active,), b_new_biases + (b_biases[f] + b_dz,)
        b_sums, b_biases = b_new, b_new_biases
        b_slope = b_below + b_h * 0.3989422804014327 * tl.exp(-0.5 * b_h * b_h)
        to_ptr = d_hidden_ptr + t * stride_dt + lane
        tl.store(to_ptr, (b_dh * b_slope).to(d_hidden_ptr.dtype.element_ty), mask=live & inside)
    at_ptr = partial_ptr + tl.program_id(0) * (FACTORS * (E + 1))
    for f in tl.static_range(FACTORS):
        tl.store(at_ptr + f * (E + 1) + lane, tl.sum(b_sums[f], 0)[None, :], mask=inside)
        tl.store(at_ptr + f * (E + 1) + E + tl.zeros([1, 1], tl.int32), tl.sum(b_biases[f], 0)[None, :])


@triton.jit(do_not_specialize=["tokens", "tiles"])
def gather_kernel(
    table_ptr, quotient_table_ptr, a_ptr, gain_ptr, scale_ptr, da_ptr, partial_ptr, gain_partial_ptr,
    tokens, tiles, heads, first, anchor, stride_d, stride_qt, stride_at, stride_dat, stride_l, stride_p, eps,
    D: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, READERS: tl.constexpr, NORMED: tl.constexpr,
    DYNAMIC: tl.constexpr, ADD: tl.constexpr, LAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One head of every P-th tile of ROWS tokens of an anchor's gradient, P the programs of a head. N is the norm that
    makes the anchor, n = a · rstd, or nothing:

    dN = Σ_l λ1_l ⊙ dm_l,  dλ1_l = Σ_tokens dm_l ⊙ N(a),  d_gain = Σ_tokens dN ⊙ n
    da = rstd (gain ⊙ dN − n mean(gain ⊙ dN ⊙ n))

    The table has the addresses of the dm_l, whose columns from `first` on are the anchor's. DYNAMIC: it has those of
    γ2_l dm_l, and λ1_l γ1_l takes the place of λ1_l, so they are multiplied by γ1_l/γ2_l: column `anchor` of the
    matrices whose addresses the other table has.
    ADD: dN is added to what da holds, which is dN of other layers. LAST: of all layers, and goes through N.
    """
    dtype: tl.constexpr = a_ptr.dtype.element_ty
    head, chunk, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.num_programs(0) // heads
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, LANES)[None, :]
    inside = (lane < D) & (row >= 0)
    c = head * D + lane
    dm_ptrs, quotient_ptrs, b_sums = (), (), ()
    b_zero = tl.zeros([ROWS, LANES], tl.float32)
    b_gain_sum = b_zero
    for l in tl.static_range(READERS):  # noqa: E741
        dm_ptrs, b_sums = dm_ptrs + (tensor(table_ptr, l, dtype) + first,), b_sums + (b_zero,)
        if DYNAMIC:
            quotient_ptrs = quotient_ptrs + (tensor(quotient_table_ptr, l, tl.float32) + anchor,)
    if NORMED:
        b_gain = tl.load(gain_ptr + lane + 0 * row, mask=inside, other=0.0).to(tl.float32)
    for tile in tl.range(chunk, tiles, chunks, num_stages=STAGES):
        t = tile * ROWS + row.to(tl.int64)
        mask = (t < tokens) & inside
        b_a = tl.load(a_ptr + t * stride_at + c, mask=mask, other=0.0).to(tl.float32)  # [ROWS, LANES]
        to_ptr = da_ptr + t * stride_dat + c
        b_dm = ()
        for l in tl.static_range(READERS):  # noqa: E741
            b_dm = b_dm + (tl.load(dm_ptrs[l] + t * stride_d + c, mask=mask, other=0.0),)
        b_da = b_zero
        if ADD:
            b_da = tl.load(to_ptr, mask=mask, other=0.0).to(tl.float32)
        if NORMED:
            b_rstd = tl.rsqrt(tl.sum(b_a * b_a, 1) / D + eps)[:, None]
            b_n = b_a * b_rstd
            b_a = b_n * b_gain
        b_new = ()
        for l in tl.static_range(READERS):  # noqa: E741
            # λ1 from the cache, for every row: kept, it would take as many registers as the sums
            b_scale = tl.load(scale_ptr + l * stride_l + c + 0 * row, mask=inside, other=0.0)
            b_wide = b_dm[l].to(tl.float32)
            if DYNAMIC:
                b_wide *= tl.load(quotient_ptrs[l] + t * stride_qt, mask=t < tokens, other=0.0)  # [ROWS, 1]
            b_da += b_wide * b_scale
            b_new = b_new + (b_sums[l] + b_wide * b_a,)
        b_sums = b_new
        if NORMED and LAST:
            b_gain_sum += b_da * b_n
            b_da *= b_gain
            b_mean = (tl.sum(b_da * b_n, 1) / D)[:, None]
            b_da = b_rstd * (b_da - b_n * b_mean)
        tl.store(to_ptr, b_da.to(dtype), mask=mask)
    c_mask = lane < D
    for l in tl.static_range(READERS):  # noqa: E741
        tl.store(partial_ptr + chunk * stride_p + l * stride_l + c, tl.sum(b_sums[l], 0)[None, :], mask=c_mask)
    if NORMED and LAST:
        tl.store(gain_partial_ptr + chunk * stride_p + c, tl.sum(b_gain_sum, 0)[None, :], mask=c_mask)
