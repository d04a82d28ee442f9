"""Triton's side of a table of addresses: writing one down, and taking a tensor from it."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["start", "count"])
def address_kernel(entries, table, start, count, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """table[start:] = `entries`, addresses. A kernel that walks over such a table is not compiled for their number."""
    for i in tl.static_range(MOST):
        if start + i < count:
            tl.store(table + start + i, entries[i].to(tl.int64))


@triton.jit
def tensor(table, slot, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tensor whose address is in `slot`, 16-byte aligned."""
    return tl.multiple_of(tl.load(table + slot).to(tl.pointer_type(dtype)), 16)
