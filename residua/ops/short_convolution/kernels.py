"""Short convolution, silu and the norm of keys and queries on the GPU: one read and one write of the projection.

    y_t = Σ_j w_j x_{t−j},   a = silu(y),   out = a for values,   scale · a / sqrt(Σa² + eps) for queries and keys

A program processes one head. Forward has tiles of ROWS tokens and reads each four times, three of them from cache.
Backward goes over PARTS times ROWS tokens, one token of each part after the other, so that it computes y and dy of a
token once: it holds the last inputs and their gradients, to which later tokens still add. Nothing is read across the
beginning of a document.
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
def _rows(x_ptr, t, stride_t, there, D: tl.constexpr):
    """One head of tokens t [PARTS], [PARTS, D], zero unless `there`."""
    at_ptr = x_ptr + t.to(tl.int64)[:, None] * stride_t + tl.arange(0, D)[None, :]
    return tl.load(at_ptr, mask=there[:, None], other=0.0).to(tl.float32)


@triton.jit
def _weight(w_ptr, begins_ptr, t, length, channels, j: tl.constexpr, TAPS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """w_j, [1, D]; with documents [PARTS, D], zero where t and the token j before it are in different ones."""
    b_w = tl.load(w_ptr + j * channels).to(tl.float32) if j < TAPS else tl.zeros_like(tl.load(w_ptr)).to(tl.float32)
    if DOCUMENTS:
        b_w *= _reaches(begins_ptr, t, length, j, DOCUMENTS).to(tl.float32)[:, None]
    return b_w


@triton.jit
def _dy(b_y, b_g, is_value, scale, eps):
    """Back through the norm, which values do not have, and silu."""
    b_sigmoid = tl.sigmoid(b_y)
    if is_value:
        b_da = b_g
    else:
        b_a = b_y * b_sigmoid
        b_rstd = tl.rsqrt(tl.sum(b_a * b_a, 1) + eps)[:, None]
        b_da = scale * b_rstd * (b_g - b_a * (b_rstd * b_rstd * tl.sum(b_a * b_g, 1)[:, None]))
    return b_da * b_sigmoid * (1.0 + b_y * (1.0 - b_sigmoid))


@triton.jit(do_not_specialize=["length", "tiles"])
def backward_kernel(
    x_ptr, w_ptr, begins_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, partial_ptr,
    length, tiles, heads, key_heads, stride_xb, stride_xt, stride_gb, stride_gt, eps,
    D: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, UNROLL: tl.constexpr,
    DOCUMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dx of PARTS times ROWS tokens of one head, and their share of dw, partial [tiles · B, TAPS, heads · D].

    dq and dk have GROUP heads for each of q and k, to be added. TAPS − 1 tokens after each part are gone over too, for
    what they give to the part's.
    """
    head, tile = tl.program_id(0) % heads, tl.program_id(0) // heads
    batch, start = tl.cast(tile // tiles, tl.int64), (tile % tiles * PARTS + tl.arange(0, PARTS)) * ROWS
    lane, channels = tl.arange(0, D)[None, :], heads * D
    x_ptr += batch * stride_xb + head * D
    dx_ptr += batch * stride_gb + head * D
    begins_ptr += batch * length
    is_value = head >= 2 * key_heads
    stride_t = tl.where(is_value, heads - 2 * key_heads, key_heads * GROUP) * D
    g_ptr = tl.where(is_value, dv_ptr, tl.where(head < key_heads, dq_ptr, dk_ptr))
    g_ptr += batch * length * stride_t + tl.where(is_value, head - 2 * key_heads, head % key_heads * GROUP) * D
    w_ptr += head * D + lane
    scale = _scale(head, key_heads, D)
    b_w0 = tl.load(w_ptr).to(tl.float32)
    # the inputs before, x_{t−1}, x_{t−2}, x_{t−3}; dx_{t−1}, dx_{t−2}, dx_{t−3} so far; and dw_0 … dw_3
    b_x1 = _rows(x_ptr, start - 1, stride_xt, (start >= 1) & (start <= length), D)
    b_x2 = _rows(x_ptr, start - 2, stride_xt, (start >= 2) & (start <= length), D)
    b_x3 = _rows(x_ptr, start - 3, stride_xt, (start >= 3) & (start <= length), D)
    b_d1, b_d2, b_d3 = tl.zeros_like(b_x1), tl.zeros_like(b_x1), tl.zeros_like(b_x1)
    b_s0, b_s1, b_s2, b_s3 = tl.zeros_like(b_x1), tl.zeros_like(b_x1), tl.zeros_like(b_x1), tl.zeros_like(b_x1)
    for step in tl.range(0, ROWS + TAPS - 1, loop_unroll_factor=UNROLL):
        t = start + step
        here = t < length
        b_x = _rows(x_ptr, t, stride_xt, here, D)
        b_g = _rows(g_ptr, t, stride_t, here, D)
        for m in tl.static_range(1, GROUP):
            b_g += _rows(g_ptr + m * D, t, stride_t, here & (head < 2 * key_heads), D)
        b_w1 = _weight(w_ptr, begins_ptr, t, length, channels, 1, TAPS, DOCUMENTS)
        b_w2 = _weight(w_ptr, begins_ptr, t, length, channels, 2, TAPS, DOCUMENTS)
        b_w3 = _weight(w_ptr, begins_ptr, t, length, channels, 3, TAPS, DOCUMENTS)
        b_dy = _dy(b_w0 * b_x + b_w1 * b_x1 + b_w2 * b_x2 + b_w3 * b_x3, b_g, is_value, scale, eps)
        # dx_{t−j} += w_j dy_t; the oldest is complete
        b_d0, b_d1 = b_w0 * b_dy, b_d1 + b_w1 * b_dy
        b_d2, b_d3 = b_d2 + b_w2 * b_dy, b_d3 + b_w3 * b_dy
        if TAPS == 1:
            b_done = b_d0
        elif TAPS == 2:
            b_done = b_d1
        elif TAPS == 3:
            b_done = b_d2
        else:
            b_done = b_d3
        done = t - (TAPS - 1)
        at_ptr = dx_ptr + done.to(tl.int64)[:, None] * stride_gt + lane
        is_own = (step >= TAPS - 1) & (done < length)
        tl.store(at_ptr, b_done.to(dx_ptr.dtype.element_ty), mask=is_own[:, None])
        # dw_j += dy_t x_{t−j}; tokens after the part belong to the next
        if step < ROWS:
            b_s0 += b_dy * b_x
            if DOCUMENTS:
                b_s1 += b_dy * tl.where(_reaches(begins_ptr, t, length, 1, DOCUMENTS)[:, None], b_x1, 0.0)
                b_s2 += b_dy * tl.where(_reaches(begins_ptr, t, length, 2, DOCUMENTS)[:, None], b_x2, 0.0)
                b_s3 += b_dy * tl.where(_reaches(begins_ptr, t, length, 3, DOCUMENTS)[:, None], b_x3, 0.0)
            else:
                b_s1, b_s2, b_s3 = b_s1 + b_dy * b_x1, b_s2 + b_dy * b_x2, b_s3 + b_dy * b_x3
        b_x3, b_x2, b_x1 = b_x2, b_x1, b_x
        b_d3, b_d2, b_d1 = b_d2, b_d1, b_d0
    at_ptr = partial_ptr + tl.cast(tile, tl.int64) * TAPS * channels + head * D + tl.arange(0, D)
    tl.store(at_ptr, tl.sum(b_s0, 0))
    if TAPS > 1:
        tl.store(at_ptr + channels, tl.sum(b_s1, 0))
    if TAPS > 2:
        tl.store(at_ptr + 2 * channels, tl.sum(b_s2, 0))
    if TAPS > 3:
        tl.store(at_ptr + 3 * channels, tl.sum(b_s3, 0))
