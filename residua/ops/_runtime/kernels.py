"""Kernels and their parts that several operators share: addresses, sums of programs, and sums reduced side by side."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["start", "count"])
def address_kernel(addresses, table_ptr, start, count, MOST: tl.constexpr):
    """table[start : start + MOST] = addresses, up to `count` entries in all."""
    for i in tl.static_range(MOST):
        if start + i < count:
            tl.store(table_ptr + start + i, addresses[i].to(tl.int64))


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def tensor(table_ptr, slot, dtype: tl.constexpr):
    """The pointer that the table holds in `slot`; it is 16-byte aligned."""
    return tl.multiple_of(tl.load(table_ptr + slot).to(tl.pointer_type(dtype)), 16)


@triton.jit
def put_halves(x_ptr, b_x1, b_x2, mask, HALF: tl.constexpr):
    """Store both halves of a head; x_ptr points to the first."""
    tl.store(x_ptr, b_x1.to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + HALF, b_x2.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_kernel(partial_ptr, total_ptr, parts, LENGTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """total [LENGTH] = Σ over the `parts` rows of partial [parts, LENGTH], BLOCK columns to a program."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_sum = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        b_sum += tl.load(partial_ptr + part.to(tl.int64) * LENGTH + c, mask=(part < parts) & (c < LENGTH), other=0.0)
    tl.store(total_ptr + c, tl.sum(b_sum, 0)[None, :], mask=c < LENGTH)
