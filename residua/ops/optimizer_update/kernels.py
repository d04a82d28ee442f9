"""Momentum and descent on the GPU. `table` holds the addresses of `count` tensors of each kind."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from residua.ops._runtime.kernels import tensor


@triton.jit
def number(value, LOADED: tl.constexpr):
    """A number, or what is at its address: a CUDA graph reads numbers that change between replays."""
    if LOADED:
        return tl.load(value).to(tl.float32)
    else:
        return value


# `size` is specialised: masked loads can be 16 bytes wide only if it is known to be a multiple of 16.
@triton.jit(do_not_specialize=["count", "beta"])
def momentum_kernel(
    table_ptr, count, size, beta, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """m ← m + (1−β)(g − m);  d = g + β(m − g)."""
    slot = tl.program_id(1)
    m_ptr, g_ptr, d_ptr = (
        tensor(table_ptr, slot, M),
        tensor(table_ptr, count + slot, G),
        tensor(table_ptr, 2 * count + slot, D),
    )
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    b_g = tl.load(g_ptr + at, mask=live).to(tl.float32)  # [BLOCK]
    b_m = tl.load(m_ptr + at, mask=live).to(tl.float32)  # [BLOCK]
    b_m += (1 - beta) * (b_g - b_m)
    tl.store(m_ptr + at, b_m.to(M), mask=live)
    tl.store(d_ptr + at, (b_g + beta * (b_m - b_g)).to(D), mask=live)


@triton.jit(do_not_specialize=["count", "beta1", "beta2", "eps"])
def adam_kernel(
    table_ptr, count, size, beta1, beta2, eps,
    M: tl.constexpr, G: tl.constexpr, LOADED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """m ← m + (1−β₁)(g − m);  v ← β₂v + (1−β₂)g²;  u = m/(√v + eps). v and u are of m's dtype."""
    slot = tl.program_id(1)
    m_ptr, v_ptr = tensor(table_ptr, slot, M), tensor(table_ptr, count + slot, M)
    g_ptr, u_ptr = tensor(table_ptr, 2 * count + slot, G), tensor(table_ptr, 3 * count + slot, M)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    b_g = tl.load(g_ptr + at, mask=live).to(tl.float32)  # [BLOCK]
    b_m = tl.load(m_ptr + at, mask=live).to(tl.float32)
    b_v = tl.load(v_ptr + at, mask=live).to(tl.float32)
    b_m += (1 - beta1) * (b_g - b_m)
    b_v = beta2 * b_v + (1 - beta2) * b_g * b_g
    tl.store(m_ptr + at, b_m.to(M), mask=live)
    tl.store(v_ptr + at, b_v.to(M), mask=live)
    tl.store(u_ptr + at, tl.div_rn(b_m, tl.sqrt_rn(b_v) + number(eps, LOADED)).to(M), mask=live)


@triton.jit(do_not_specialize=["count", "rate", "decay"])
def descent_kernel(
    table_ptr, count, size, rate, decay,
    X: tl.constexpr, U: tl.constexpr, CAUTIOUS: tl.constexpr, LOADED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    x_ptr, u_ptr = tensor(table_ptr, slot, X), tensor(table_ptr, count + slot, U)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < size
    b_x = tl.load(x_ptr + at, mask=live).to(tl.float32)  # [BLOCK]
    b_u = tl.load(u_ptr + at, mask=live).to(tl.float32)
    # x ← x − decay·x − rate·u; if CAUTIOUS, with decay where u⊙x ≥ 0 only
    b_decay = number(decay, LOADED) * b_x
    if CAUTIOUS:
        b_decay = tl.where(b_u * b_x >= 0, b_decay, 0.0)
    b_kept = b_x - b_decay
    tl.store(x_ptr + at, (b_kept - number(rate, LOADED) * b_u).to(X), mask=live)
