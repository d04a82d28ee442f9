"""FP8 codes on the GPU: of activations and gradients in one pass, and of all weights of a step.

For weights, `table` holds the addresses of `count` tensors of each kind: W, codes, scale.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


@triton.jit
def largest_kernel(table_ptr, bits_ptr, size, W: tl.constexpr, BLOCK: tl.constexpr):
    """bits [count] = max|W|, as integers: the order of floats of one sign, in which NaN is largest."""
    slot = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_w = tl.load(tensor(table_ptr, slot, W) + at, mask=at < size, other=0.0).to(tl.float32)  # [BLOCK]
    b_bits = b_w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # a maximum does not depend on the order of programs
    tl.atomic_max(bits_ptr + slot, tl.max(b_bits, 0))


@triton.jit
def on_grid(b_x, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """x rounded to MANTISSA bits, ties to even, or, below SMALLEST, to a multiple of its last bit.

    What is added has the last bit of its mantissa where that of the result is. The cast to FP8 is exact then, also in
    the interpreter, whose own does not round to the next power of two.
    """
    b_power = (b_x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_shift = tl.maximum(b_power, SMALLEST) * (1.5 * 2.0 ** (23 - MANTISSA))
    return (b_x + b_shift) - b_shift


@triton.jit(do_not_specialize=["count"])
def encode_kernel(
    table_ptr, bits_ptr, count, size, LIMIT: tl.constexpr, EMPTY: tl.constexpr, W: tl.constexpr,
    STEPWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The codes of each weight, and its scale."""
    slot = tl.program_id(1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    b_w = tl.load(tensor(table_ptr, slot, W) + at, mask=live, other=0.0).to(tl.float32)  # [BLOCK]
    # s = 2^⌈log₂(max|W| / 448)⌉, code = E4M3(clamp(W / s, ±448)); NaN stays
    share = tl.div_rn(tl.load(bits_ptr + slot).to(tl.float32, bitcast=True), LIMIT)
    bits = share.to(tl.int32, bitcast=True)
    above = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(bits >= 0x7F800000, share, tl.where(above == 0, EMPTY, above))
    b_w = tl.clamp(b_w * (1 / scale), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if STEPWISE:
        b_w = on_grid(b_w, 3, 2.0**-6)
    tl.store(tensor(table_ptr, count + slot, tl.float8e4nv) + at, b_w.to(tl.float8e4nv), mask=live)
    if tl.program_id(0) == 0:
        tl.store(tensor(table_ptr, 2 * count + slot, tl.float32), scale)


@triton.jit(do_not_specialize=["count"])
def transpose_kernel(table_ptr, count, rows, columns, TILE: tl.constexpr):
    """turned [columns, rows] = codesᵀ, as bytes; the table holds the addresses of `count` codes, then of `turned`."""
    slot, across = tl.program_id(1), tl.cdiv(columns, TILE)
    r = tl.program_id(0) // across * TILE + tl.arange(0, TILE)
    c = tl.program_id(0) % across * TILE + tl.arange(0, TILE)
    live = (r < rows)[:, None] & (c < columns)[None, :]
    codes_ptr = tensor(table_ptr, slot, tl.uint8) + r.to(tl.int64)[:, None] * columns
    b_codes = tl.load(codes_ptr + c[None, :], mask=live, other=0)  # [TILE, TILE]
    turned_ptr = tensor(table_ptr, count + slot, tl.uint8) + c.to(tl.int64)[:, None] * rows
    tl.store(turned_ptr + r[None, :], tl.trans(b_codes), mask=tl.trans(live))


@triton.jit
def values_kernel(
    x_ptr, a_ptr, scale_ptr, y_ptr, codes_ptr, bits_ptr, size,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, STEPWISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of a tensor of any shape, and bits [programs] of the largest magnitude that each program saw.

    The tensor is x ("values"); or y = relu(x)² ("squares") or x ⊙ 2√a ("slopes"), which is written too. STEPWISE: round
    to the grid of the codes before the cast, as the interpreter needs it.
    """
    LIMIT: tl.constexpr = 57344.0 if GRADIENT else 448.0
    inverse = 1 / tl.load(scale_ptr)
    b_most = tl.zeros([BLOCK], tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = at < size
        b_y = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BLOCK]
        if KIND == "squares":
            b_y = tl.maximum(b_y, 0.0, propagate_nan=tl.PropagateNan.ALL)
            b_y *= b_y
        if KIND == "slopes":
            b_y *= 2 * tl.sqrt_rn(tl.load(a_ptr + at, mask=live, other=0.0).to(tl.float32))
        if KIND != "values":
            b_stored = b_y.to(y_ptr.dtype.element_ty)
            tl.store(y_ptr + at, b_stored, mask=live)
            b_y = b_stored.to(tl.float32)
        b_most = tl.maximum(b_most, b_y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        b_y = tl.clamp(b_y * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if STEPWISE:
            b_y = on_grid(b_y, 2 if GRADIENT else 3, 2.0**-14 if GRADIENT else 2.0**-6)
        tl.store(codes_ptr + at, b_y.to(codes_ptr.dtype.element_ty), mask=live)
    tl.store(bits_ptr + tl.program_id(0), tl.max(b_most, 0))
