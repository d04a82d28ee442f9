"""Momentum and cautious descent on the GPU. `table` holds the addresses of `count` tensors of each kind."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


# `size` is specialised: masked loads can be 16 bytes wide only if it is known to be a multiple of 16.
@triton.jit(do_not_specialize=["count", "beta"])
def momentum_kernel(
    table_ptr, count, size, beta, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """m ← m + (1−β)(g − m);  d = g + β(m − g)."""
    slot = tl.program_id(1)
    m, g, d = tensor(table_ptr, slot, M), tensor(table_ptr, count + slot, G), tensor(table_ptr, 2 * count + slot, D)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(g + at, mask=inside).to(tl.float32)
    momentum = tl.load(m + at, mask=inside).to(tl.float32)
    momentum += (1 - beta) * (gradient - momentum)
    tl.store(m + at, momentum.to(M), mask=inside)
    tl.store(d + at, (gradient + beta * (momentum - gradient)).to(D), mask=inside)


@triton.jit(do_not_specialize=["count", "rate", "decay"])
def descent_kernel(table_ptr, count, size, rate, decay, X: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(1)
    x, u = tensor(table_ptr, slot, X), tensor(table_ptr, count + slot, U)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(x + at, mask=inside).to(tl.float32)
    update = tl.load(u + at, mask=inside).to(tl.float32)
    kept = weight - tl.where(update * weight >= 0, decay * weight, 0.0)
    tl.store(x + at, (kept - rate * update).to(X), mask=inside)
