"""Triton kernels inside a sublayer: heads of prompts and of one token per row, attention to a cache, the activation."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import put_halves


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
def _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF: tl.constexpr, NORM: tl.constexpr, AXIS: tl.constexpr):
    """The two halves of heads [ROWS, LANES], or of one [LANES]: gain ⊙ RMS(x), then rotated."""
    b_x1, b_x2 = b_x1.to(tl.float32), b_x2.to(tl.float32)
    if NORM:
        b_rstd = tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, AXIS, keep_dims=True) / (2 * HALF) + eps)
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
            b_y1, b_y2 = _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF, NORM, 1)
            put_halves(target_ptr + head * 2 * HALF, b_y1, b_y2, mask, HALF)
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
                put_halves(target_ptr + head * 2 * HALF, b_y1, b_y2, mask, HALF)
            else:
                put_halves(target_ptr + head * 2 * HALF, b_x1, b_x2, mask, HALF)


@triton.jit
def enter_cache_kernel(
    x_ptr, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, anchor_ptr, anchor_scale_ptr, scale_ptr,
    positions_ptr, q_ptr, stride_xb, stride_kb, stride_ks, stride_kh, stride_ab, stride_sh, stride_sd, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
    MIXED: tl.constexpr,
):  # fmt: skip
    """Program (b, h) is query head h, or from HEADS on a key and its value."""
    batch, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, LANES)
    live = half < HALF
    position = tl.load(positions_ptr + batch)
    b_cos = tl.load(cos_ptr + position * HALF + half, mask=live, other=0.0)  # [LANES]
    b_sin = tl.load(sin_ptr + position * HALF + half, mask=live, other=0.0)
    head_ptr = x_ptr + batch * stride_xb + h * 2 * HALF + half
    b_x1, b_x2 = _halves(head_ptr, live, HALF)
    # a query: normed, rotated, returned
    if h < HEADS:
        b_w1, b_w2 = _halves(q_gain_ptr + half, live, HALF)
        b_y1, b_y2 = _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF, NORM, 0)
        put_halves(q_ptr + (batch * HEADS + h) * 2 * HALF + half, b_y1, b_y2, live, HALF)
    else:
        # a key: normed, rotated, put into its slot; and its value, as it is or mixed with its anchor
        b_w1, b_w2 = _halves(k_gain_ptr + half, live, HALF)
        b_y1, b_y2 = _turned(b_x1, b_x2, b_w1, b_w2, b_cos, b_sin, eps, HALF, NORM, 0)
        slot = batch * stride_kb + position * stride_ks + (h - HEADS) * stride_kh + half
        put_halves(k_ptr + slot, b_y1, b_y2, live, HALF)
        b_v1, b_v2 = _halves(head_ptr + KV * 2 * HALF, live, HALF)
        b_v1, b_v2 = b_v1.to(tl.float32), b_v2.to(tl.float32)
        if MIXED:
            b_a1, b_a2 = _halves(anchor_ptr + batch * stride_ab + (h - HEADS) * 2 * HALF + half, live, HALF)
            here = (h - HEADS) * stride_sh + half * stride_sd
            there = here + HALF * stride_sd
            b_v1 = _mixed(b_a1, b_v1, anchor_scale_ptr + here, scale_ptr + here, live)
            b_v2 = _mixed(b_a2, b_v2, anchor_scale_ptr + there, scale_ptr + there, live)
        put_halves(v_ptr + slot, b_v1, b_v2, live, HALF)


@triton.jit
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, until_ptr, sink_ptr, out_ptr, part_ptr, part_lse_ptr, arrived_ptr, scale,
    stride_qb, stride_kb, stride_ks, stride_kh,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Program (b·H + h, split) attends to its share of the slots; the last program of a head merges the shares.

    Shares depend on the row's own length, so that all programs of a head have the same amount of work.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    batch, h = (head // HEADS).to(tl.int64), head % HEADS
    d, lane = tl.arange(0, LANES), tl.arange(0, SLOTS)
    live = d < D
    b_q = tl.load(q_ptr + batch * stride_qb + h * D + d, mask=live, other=0.0).to(tl.float32) * scale  # [LANES]
    last = tl.load(until_ptr + batch)
    share = tl.cdiv(tl.cdiv(last + 1, SPLITS), SLOTS) * SLOTS
    first, end = split * share, tl.minimum((split + 1) * share, last + 1)
    cell = batch * stride_kb + (h // GROUPS) * stride_kh + d[None, :]

    # this program's slots: z = q · k/√D, online softmax over them
    b_top = tl.full([SLOTS], -float("inf"), tl.float32)
    b_total = tl.zeros([SLOTS], tl.float32)
    b_o = tl.zeros([SLOTS, LANES], tl.float32)
    for start in range(first, end, SLOTS):
        slot = start + lane
        mask = (slot < end)[:, None] & live[None, :]
        b_k = tl.load(k_ptr + cell + slot[:, None] * stride_ks, mask=mask, other=0.0).to(tl.float32)  # [SLOTS, LANES]
        b_v = tl.load(v_ptr + cell + slot[:, None] * stride_ks, mask=mask, other=0.0).to(tl.float32)  # [SLOTS, LANES]
        b_z = tl.where(slot < end, tl.sum(b_k * b_q[None, :], 1), -float("inf"))  # [SLOTS]
        # every lane keeps its own maximum; the lanes are merged once, after the loop
        b_higher = tl.maximum(b_top, b_z)
        b_safe = tl.where(b_higher == -float("inf"), 0.0, b_higher)
        b_e, b_keep = tl.exp(b_z - b_safe), tl.exp(b_top - b_safe)
        b_o = b_o * b_keep[:, None] + b_e[:, None] * b_v
        b_total = b_total * b_keep + b_e
        b_top = b_higher
    # merge the lanes: y = Σ softmax(z) v and its lse
    highest = tl.max(b_top, 0)
    b_safe = tl.where(highest == -float("inf"), 0.0, highest)
    b_e = tl.exp(b_top - b_safe)
    whole = tl.sum(b_total * b_e, 0)
    b_y = tl.sum(b_o * b_e[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    lse = tl.where(whole == 0.0, -float("inf"), b_safe + tl.log(tl.where(whole == 0.0, 1.0, whole)))

    # one share: the result, with exp(sink) in the denominator. Several: the last one to arrive merges them.
    result_ptr = out_ptr + head.to(tl.int64) * D + d
    if SPLITS == 1:
        if SINK:
            b_y = b_y * tl.sigmoid(lse - tl.load(sink_ptr + h).to(tl.float32))
        tl.store(result_ptr, b_y.to(out_ptr.dtype.element_ty), mask=live)
    else:
        mine = (head * SPLITS + split).to(tl.int64)
        tl.store(part_ptr + mine * D + d, b_y, mask=live)
        tl.store(part_lse_ptr + mine, lse)
        tl.debug_barrier()  # all threads' stores come before the count that announces them
        if tl.atomic_add(arrived_ptr + head, 1, sem="acq_rel") == SPLITS - 1:
            shares = (head * SPLITS + tl.arange(0, SPLITS)).to(tl.int64)
            b_lse = tl.load(part_lse_ptr + shares, cache_modifier=".cg")
            best = tl.max(b_lse, 0)
            b_weights = tl.exp(b_lse - best)
            sum = tl.sum(b_weights, 0)
            every_ptr = part_ptr + shares[:, None] * D + d[None, :]
            b_parts = tl.load(every_ptr, mask=live[None, :], other=0.0, cache_modifier=".cg")
            b_merged = tl.sum(b_parts * (b_weights / sum)[:, None], 0)
            if SINK:
                b_merged = b_merged * tl.sigmoid(best + tl.log(sum) - tl.load(sink_ptr + h).to(tl.float32))
            tl.store(result_ptr, b_merged.to(out_ptr.dtype.element_ty), mask=live)
            tl.store(arrived_ptr + head, 0)  # ready for the next launch


@triton.jit
def activation(b_x, KIND: tl.constexpr):
    """An activation by the name of its kind; of gated kinds, the factor of the other half."""
    if KIND == "relu2":
        b_x = tl.maximum(b_x, 0.0, tl.PropagateNan.ALL)
        return b_x * b_x
    elif KIND == "gelu":
        return 0.5 * b_x * (1 + tl.erf(b_x * 0.7071067811865476))
    elif KIND == "swiglu":
        return b_x * tl.sigmoid(b_x)
    else:
        return tl.sigmoid(b_x)


@triton.jit
def activate_kernel(
    x_ptr, out_ptr, HIDDEN: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Program (m, part): STEP channels of row m."""
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEP + tl.arange(0, STEP)
    live = j < HIDDEN
    GATED: tl.constexpr = KIND == "swiglu" or KIND == "glu"
    row_ptr = x_ptr + row * HIDDEN * (1 + GATED) + j
    b_y = activation(tl.load(row_ptr, mask=live, other=0.0).to(tl.float32), KIND)  # [STEP]
    if GATED:
        b_y = b_y * tl.load(row_ptr + HIDDEN, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * HIDDEN + j, b_y.to(out_ptr.dtype.element_ty), mask=live)
