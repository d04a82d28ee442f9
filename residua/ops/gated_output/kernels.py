"""Output norm and gate on the GPU: y = weight ⊙ o · rstd ⊙ gate(z), rows of D channels, ROWS to a tile.

Row r is head r % heads of token r // heads; z may be part of a wider tensor. Backward needs only the inputs: it
recomputes rstd from o, which it reads anyway.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _at(x_ptr, row, heads, stride_b, stride_t, length, D: tl.constexpr):
    """Pointers to rows [ROWS, D] of [B, T, H, D] whose last two axes are dense."""
    token = row // heads
    at = (token // length).to(tl.int64) * stride_b + (token % length).to(tl.int64) * stride_t + row % heads * D
    return x_ptr + at[:, None] + tl.arange(0, D)[None, :]


@triton.jit
def _load(x_ptr, row, heads, stride_b, stride_t, length, live, D: tl.constexpr):
    at_ptr = _at(x_ptr, row, heads, stride_b, stride_t, length, D)
    return tl.load(at_ptr, mask=live[:, None], other=0.0).to(tl.float32)


@triton.jit
def _store(x_ptr, b_x, row, live, D: tl.constexpr):
    """Rows of a dense tensor."""
    at_ptr = x_ptr + row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at_ptr, b_x.to(x_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def _gate(b_z, SILU: tl.constexpr):
    """silu(z) or σ(z), and its slope."""
    b_sigmoid = tl.sigmoid(b_z)
    if SILU:
        b_gate, b_slope = b_z * b_sigmoid, b_sigmoid * (1.0 + b_z * (1.0 - b_sigmoid))
    else:
        b_gate, b_slope = b_sigmoid, b_sigmoid * (1.0 - b_sigmoid)
    return b_gate, b_slope


@triton.jit(do_not_specialize=["rows", "length"])
def forward_kernel(
    o_ptr, z_ptr, weight_ptr, y_ptr, rows, length, heads, stride_ob, stride_ot, stride_zb, stride_zt, eps,
    D: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    b_o = _load(o_ptr, row, heads, stride_ob, stride_ot, length, live, D)
    b_z = _load(z_ptr, row, heads, stride_zb, stride_zt, length, live, D)
    b_weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)[None, :]
    b_rstd = tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)[:, None]
    b_gate, _ = _gate(b_z, SILU)
    _store(y_ptr, b_weight * b_o * b_rstd * b_gate, row, live, D)


@triton.jit(do_not_specialize=["rows", "length", "tiles"])
def backward_kernel(
    dy_ptr, o_ptr, z_ptr, weight_ptr, do_ptr, dz_ptr, partial_ptr, rows, length, tiles, heads,
    stride_gb, stride_gt, stride_ob, stride_ot, stride_zb, stride_zt, stride_db, stride_dt, eps,
    D: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Every P-th tile, P the programs; partial [P, D] gets each program's share of the weight's gradient."""
    b_weight = tl.load(weight_ptr + tl.arange(0, D)).to(tl.float32)[None, :]
    b_sum = tl.zeros([ROWS, D], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < rows
        b_dy = _load(dy_ptr, row, heads, stride_gb, stride_gt, length, live, D)
        b_o = _load(o_ptr, row, heads, stride_ob, stride_ot, length, live, D)
        b_z = _load(z_ptr, row, heads, stride_zb, stride_zt, length, live, D)
        b_rstd = tl.rsqrt(tl.sum(b_o * b_o, 1) / D + eps)[:, None]
        b_n = b_o * b_rstd
        # through the gate
        b_gate, b_slope = _gate(b_z, SILU)
        b_dz = (b_dy * b_weight * b_n * b_slope).to(dz_ptr.dtype.element_ty)
        tl.store(_at(dz_ptr, row, heads, stride_db, stride_dt, length, D), b_dz, mask=live[:, None])
        # through the norm
        b_g = b_dy * b_gate
        b_sum += b_g * b_n
        b_g *= b_weight
        b_mean = (tl.sum(b_g * b_n, 1) / D)[:, None]
        _store(do_ptr, b_rstd * (b_g - b_n * b_mean), row, live, D)
    tl.store(partial_ptr + tl.program_id(0) * D + tl.arange(0, D), tl.sum(b_sum, 0))
