"""Triton kernels inside a sublayer that decodes: heads into the cache, attention to it, the activation."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _turned(x, gain, cos, sin, half, inside, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of a head: gain ⊙ RMS(x), then turned."""
    x1 = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 0) / (2 * HALF) + eps)
        x1 = x1 * rstd * tl.load(gain + half, mask=inside, other=0.0).to(tl.float32)
        x2 = x2 * rstd * tl.load(gain + HALF + half, mask=inside, other=0.0).to(tl.float32)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def enter_cache_kernel(
    projected, q_gain, k_gain, cos, sin, keys, values, positions, q, stride, kb, ks, kh, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, LANES: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (b, h) is query head h, or from HEADS on a key and its value."""
    batch, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, LANES)
    inside = half < HALF
    position = tl.load(positions + batch)
    c = tl.load(cos + position * HALF + half, mask=inside, other=0.0)
    s = tl.load(sin + position * HALF + half, mask=inside, other=0.0)
    x = projected + batch * stride + h * 2 * HALF
    if h < HEADS:
        y1, y2 = _turned(x, q_gain, c, s, half, inside, eps, HALF, NORM)
        to = q + (batch * HEADS + h) * 2 * HALF + half
        tl.store(to, y1.to(q.dtype.element_ty), mask=inside)
        tl.store(to + HALF, y2.to(q.dtype.element_ty), mask=inside)
    else:
        y1, y2 = _turned(x, k_gain, c, s, half, inside, eps, HALF, NORM)
        slot = batch * kb + position * ks + (h - HEADS) * kh + half
        tl.store(keys + slot, y1.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + slot + HALF, y2.to(keys.dtype.element_ty), mask=inside)
        v = x + KV * 2 * HALF + half
        tl.store(values + slot, tl.load(v, mask=inside, other=0.0).to(values.dtype.element_ty), mask=inside)
        v2 = tl.load(v + HALF, mask=inside, other=0.0)
        tl.store(values + slot + HALF, v2.to(values.dtype.element_ty), mask=inside)


@triton.jit
def decode_attention_kernel(
    q, keys, values, until, sink, out, part, part_lse, arrived, scale, sq, kb, ks, kh,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Program (b·H + h, split) attends to its share of the slots; the last of a head's shares to arrive merges them.

    Shares are cut by the row's own length, so that all programs of a head have the same to do.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    batch, h = (head // HEADS).to(tl.int64), head % HEADS
    d, lane = tl.arange(0, LANES), tl.arange(0, SLOTS)
    wide = d < D
    query = tl.load(q + batch * sq + h * D + d, mask=wide, other=0.0).to(tl.float32) * scale
    last = tl.load(until + batch)
    share = tl.cdiv(tl.cdiv(last + 1, SPLITS), SLOTS) * SLOTS
    first, end = split * share, tl.minimum((split + 1) * share, last + 1)
    cell = batch * kb + (h // GROUPS) * kh + d[None, :]

    top = tl.full([SLOTS], -float("inf"), tl.float32)
    total = tl.zeros([SLOTS], tl.float32)
    mixed = tl.zeros([SLOTS, LANES], tl.float32)
    for start in range(first, end, SLOTS):
        slot = start + lane
        mask = (slot < end)[:, None] & wide[None, :]
        k = tl.load(keys + cell + slot[:, None] * ks, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(values + cell + slot[:, None] * ks, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(slot < end, tl.sum(k * query[None, :], 1), -float("inf"))
        # every lane keeps a maximum of its own: the lanes meet once, after the loop
        higher = tl.maximum(top, z)
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        e, keep = tl.exp(z - safe), tl.exp(top - safe)
        mixed = mixed * keep[:, None] + e[:, None] * v
        total = total * keep + e
        top = higher
    highest = tl.max(top, 0)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    e = tl.exp(top - safe)
    whole = tl.sum(total * e, 0)
    y = tl.sum(mixed * e[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    lse = tl.where(whole == 0.0, -float("inf"), safe + tl.log(tl.where(whole == 0.0, 1.0, whole)))

    result = out + head.to(tl.int64) * D + d
    if SPLITS == 1:
        if SINK:
            y = y * tl.sigmoid(lse - tl.load(sink + h).to(tl.float32))
        tl.store(result, y.to(out.dtype.element_ty), mask=wide)
    else:
        mine = (head * SPLITS + split).to(tl.int64)
        tl.store(part + mine * D + d, y, mask=wide)
        tl.store(part_lse + mine, lse)
        tl.debug_barrier()  # all threads' stores come before the count that announces them
        if tl.atomic_add(arrived + head, 1, sem="acq_rel") == SPLITS - 1:
            shares = (head * SPLITS + tl.arange(0, SPLITS)).to(tl.int64)
            every_lse = tl.load(part_lse + shares, cache_modifier=".cg")
            best = tl.max(every_lse, 0)
            weights = tl.exp(every_lse - best)
            sum = tl.sum(weights, 0)
            every = part + shares[:, None] * D + d[None, :]
            every_y = tl.load(every, mask=wide[None, :], other=0.0, cache_modifier=".cg")
            merged = tl.sum(every_y * (weights / sum)[:, None], 0)
            if SINK:
                merged = merged * tl.sigmoid(best + tl.log(sum) - tl.load(sink + h).to(tl.float32))
            tl.store(result, merged.to(out.dtype.element_ty), mask=wide)
            tl.store(arrived + head, 0)  # ready for the next launch


@triton.jit
def activate_kernel(
    x, out, HIDDEN: tl.constexpr, STEP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Program (m, part)."""
    row, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = j < HIDDEN
    GATED: tl.constexpr = KIND == "swiglu" or KIND == "glu"
    at = x + row * HIDDEN * (1 + GATED) + j
    v = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu2":
        v = tl.maximum(v, 0.0, tl.PropagateNan.ALL)
        y = v * v
    elif KIND == "gelu":
        y = 0.5 * v * (1 + tl.erf(v * 0.7071067811865476))
    else:
        y = tl.sigmoid(v)
        if KIND == "swiglu":
            y = v * y
        y = y * tl.load(at + HIDDEN, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + j, y.to(out.dtype.element_ty), mask=inside)
