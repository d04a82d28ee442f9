"""Short convolution, silu and the norm of keys and queries on the GPU: one read and one write of the projection.

    y_t = Σ_j w_j x_{t−j},   a = silu(y),   out = a for values,   scale · a / sqrt(Σa² + eps) for queries and keys

A program takes one head. Forward takes tiles of ROWS tokens and reads each four times, three of them from cache.
Backward goes over ROWS tokens one by one, so that it computes y and dy of a token once: it holds the last inputs and
their gradients, to which later tokens still add. Nothing is read across the beginning of a document.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _reaches(begins_ptr, t, length, j: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Whether token t and the one j before it are in one document, and both there; begins_ptr is the sequence's."""
    reaches = (t >= j) & (t < length)
    if DOCUMENTS:
        for i in tl.static_range(j):
            reaches &= tl.load(begins_ptr + t - i, mask=reaches, other=1) == 0
    return reaches


@triton.jit
def _scale(head, key_heads, D: tl.constexpr):
    """1/√D for queries, 1 for keys."""
    return tl.where(head < key_heads, 1.0 / tl.sqrt(tl.cast(D, tl.float32)), 1.0)


@triton.jit(do_not_specialize=["length", "tiles"])
def forward_kernel(
    x_ptr, w_ptr, begins_ptr, q_ptr, k_ptr, v_ptr, length, tiles, heads, key_heads, stride_xb, stride_xt, eps,
    D: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head of x [B, T, heads · D]."""
    head, tile = tl.program_id(0) % heads, tl.program_id(0) // heads
    batch, t = tl.cast(tile // tiles, tl.int64), tile % tiles * ROWS + tl.arange(0, ROWS)
    lane, channels = tl.arange(0, D)[None, :], heads * D
    at_ptr = x_ptr + batch * stride_xb + head * D + t.to(tl.int64)[:, None] * stride_xt + lane
    # a = silu(Σ_j w_j x_{t−j})
    b_y = tl.zeros([ROWS, D], tl.float32)
    for j in tl.static_range(TAPS):
        reaches = _reaches(begins_ptr + batch * length, t, length, j, DOCUMENTS)[:, None]
        b_w = tl.load(w_ptr + j * channels + head * D + lane).to(tl.float32)
        b_y += b_w * tl.load(at_ptr - j * stride_xt, mask=reaches, other=0.0).to(tl.float32)
    b_a = b_y * tl.sigmoid(b_y)
    here = (t < length)[:, None]
    token = (batch * length + t)[:, None]
    if head < 2 * key_heads:
        b_a *= _scale(head, key_heads, D) * tl.rsqrt(tl.sum(b_a * b_a, 1) + eps)[:, None]
        out_ptr = tl.where(head < key_heads, q_ptr, k_ptr) + (token * key_heads + head % key_heads) * D + lane
        tl.store(out_ptr, b_a.to(q_ptr.dtype.element_ty), mask=here)
    else:
        out_ptr = v_ptr + (token * (heads - 2 * key_heads) + head - 2 * key_heads) * D + lane
        tl.store(out_ptr, b_a.to(v_ptr.dtype.element_ty), mask=here)


@triton.jit
def _row(x_ptr, t, stride_t, reaches, D: tl.constexpr):
    """Channels of one head of token t, [D], zero unless `reaches`."""
    at_ptr = x_ptr + tl.cast(t, tl.int64) * stride_t + tl.arange(0, D)
    return tl.load(at_ptr, mask=reaches & (tl.arange(0, D) >= 0), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length", "tiles"])
def backward_kernel(
    x_ptr, w_ptr, begins_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, partial_ptr,
    length, tiles, heads, key_heads, stride_xb, stride_xt, stride_gb, stride_gt, eps,
    D: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, DOCUMENTS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """dx of ROWS tokens of one head, and this tile's share of dw, partial [tiles · B, TAPS, heads · D].

    dq and dk have GROUP heads for each of q and k, to be added. TAPS − 1 tokens after the tile are gone over too, for
    what they give to the tile's.
    """
    head, tile = tl.program_id(0) % heads, tl.program_id(0) // heads
    batch, start = tl.cast(tile // tiles, tl.int64), tile % tiles * ROWS
    lane, channels = tl.arange(0, D), heads * D
    x_ptr += batch * stride_xb + head * D
    dx_ptr += batch * stride_gb + head * D
    begins_ptr += batch * length
    is_value = head >= 2 * key_heads
    stride_t = tl.where(is_value, heads - 2 * key_heads, key_heads * GROUP) * D
    g_ptr = tl.where(is_value, dv_ptr, tl.where(head < key_heads, dq_ptr, dk_ptr))
    g_ptr += batch * length * stride_t + tl.where(is_value, head - 2 * key_heads, head % key_heads * GROUP) * D
    w_ptr += head * D + lane
    b_w0 = tl.load(w_ptr).to(tl.float32)
    b_w1 = tl.load(w_ptr + channels).to(tl.float32) if TAPS > 1 else tl.zeros([D], tl.float32)
    b_w2 = tl.load(w_ptr + 2 * channels).to(tl.float32) if TAPS > 2 else tl.zeros([D], tl.float32)
    b_w3 = tl.load(w_ptr + 3 * channels).to(tl.float32) if TAPS > 3 else tl.zeros([D], tl.float32)
    scale = _scale(head, key_heads, D)
    # the inputs before the tile, x_{t−1}, x_{t−2}, x_{t−3}; and dx_{t−1}, dx_{t−2}, dx_{t−3} so far
    b_x1 = _row(x_ptr, start - 1, stride_xt, (start >= 1) & (TAPS > 1), D)
    b_x2 = _row(x_ptr, start - 2, stride_xt, (start >= 2) & (TAPS > 2), D)
    b_x3 = _row(x_ptr, start - 3, stride_xt, (start >= 3) & (TAPS > 3), D)
    b_d1, b_d2, b_d3 = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    b_s0, b_s1 = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    b_s2, b_s3 = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    for t in tl.range(start, start + ROWS + TAPS - 1, loop_unroll_factor=UNROLL):
        here = t < length
        b_x = _row(x_ptr, t, stride_xt, here, D)
        b_g = _row(g_ptr, t, stride_t, here, D)
        for m in tl.static_range(1, GROUP):
            b_g += _row(g_ptr + m * D, t, stride_t, here & (head < 2 * key_heads), D)
        m1 = _reaches(begins_ptr, t, length, 1, DOCUMENTS).to(tl.float32)
        m2 = _reaches(begins_ptr, t, length, 2, DOCUMENTS).to(tl.float32)
        m3 = _reaches(begins_ptr, t, length, 3, DOCUMENTS).to(tl.float32)
        b_v1, b_v2, b_v3 = m1 * b_w1, m2 * b_w2, m3 * b_w3
        b_y = b_w0 * b_x + b_v1 * b_x1 + b_v2 * b_x2 + b_v3 * b_x3
        # through the norm and silu
        b_sigmoid = tl.sigmoid(b_y)
        b_a = b_y * b_sigmoid
        rstd = tl.rsqrt(tl.sum(b_a * b_a) + eps)
        b_normed = scale * rstd * (b_g - b_a * (rstd * rstd * tl.sum(b_a * b_g)))
        b_dy = tl.where(is_value, b_g, b_normed) * b_sigmoid * (1.0 + b_y * (1.0 - b_sigmoid))
        # dw_j += dy_t x_{t−j}; tokens after the tile belong to the next
        own = (t < start + ROWS).to(tl.float32)
        b_own = own * b_dy
        b_s0 += b_own * b_x
        b_s1 += m1 * b_own * b_x1
        b_s2 += m2 * b_own * b_x2
        b_s3 += m3 * b_own * b_x3
        # dx_{t−j} += w_j dy_t; the oldest is complete
        b_d0, b_d1 = b_w0 * b_dy, b_d1 + b_v1 * b_dy
        b_d2, b_d3 = b_d2 + b_v2 * b_dy, b_d3 + b_v3 * b_dy
        if TAPS == 1:
            b_done = b_d0
        elif TAPS == 2:
            b_done = b_d1
        elif TAPS == 3:
            b_done = b_d2
        else:
            b_done = b_d3
        done = t - (TAPS - 1)
        at_ptr = dx_ptr + tl.cast(done, tl.int64) * stride_gt + lane
        tl.store(at_ptr, b_done.to(dx_ptr.dtype.element_ty), mask=(done >= start) & (done < length) & (lane >= 0))
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x
        b_d3, b_d2, b_d1 = b_d2, b_d1, b_d0
    at_ptr = partial_ptr + tl.cast(tile, tl.int64) * TAPS * channels + head * D + lane
    tl.store(at_ptr, b_s0)
    if TAPS > 1:
        tl.store(at_ptr + channels, b_s1)
    if TAPS > 2:
        tl.store(at_ptr + 2 * channels, b_s2)
    if TAPS > 3:
        tl.store(at_ptr + 3 * channels, b_s3)
