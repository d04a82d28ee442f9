"""Momentum and cautious descent fused: each tensor is read once and written once.

Bytes per weight: 14 for the momentum (g; m twice; a bf16 direction) and 10 for the descent (x twice; a bf16 update),
where list operations move 30 and 60. Tensors of one size share a launch and a table of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.addresses import addresses
from residua.ops._runtime.triton_table import tensor

BLOCK = 65536 if fused.INTERPRETED else 4096


# Kernels are told whether the size is a multiple of 16: only then can loads under a mask be 16 bytes wide.
@triton.jit(do_not_specialize=["count", "beta"])
def _momentum_kernel(
    table, count, size, beta, M: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """m ← m + (1−β)(g − m);  d = g + β(m − g)."""
    slot = tl.program_id(1)
    m, g, d = tensor(table, slot, M), tensor(table, count + slot, G), tensor(table, 2 * count + slot, D)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gradient = tl.load(g + at, mask=inside).to(tl.float32)
    momentum = tl.load(m + at, mask=inside).to(tl.float32)
    momentum += (1 - beta) * (gradient - momentum)
    tl.store(m + at, momentum.to(M), mask=inside)
    tl.store(d + at, (gradient + beta * (momentum - gradient)).to(D), mask=inside)


@triton.jit(do_not_specialize=["count", "rate", "decay"])
def _descent_kernel(table, count, size, rate, decay, X: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.program_id(1)
    x, u = tensor(table, slot, X), tensor(table, count + slot, U)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(x + at, mask=inside).to(tl.float32)
    update = tl.load(u + at, mask=inside).to(tl.float32)
    kept = weight - tl.where(update * weight >= 0, decay * weight, 0.0)
    tl.store(x + at, (kept - rate * update).to(X), mask=inside)


def momentum_directions(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> list[Tensor]:
    """The operator's contract is the reference's."""
    directions = [torch.empty_like(m, dtype=dtype) for m in momenta]
    for m, g, d in _alike(momenta, gradients, directions):
        table, size = addresses(m, [t.data_ptr() for t in (*g, *d)]), m[0].numel()
        types = {"M": _TYPES[m[0].dtype], "G": _TYPES[g[0].dtype], "D": _TYPES[dtype]}
        with torch.cuda.device_of(m[0]):
            _momentum_kernel[(triton.cdiv(size, BLOCK), len(m))](
                table, len(m), size, float(beta), **types, BLOCK=BLOCK, num_warps=8
            )
    return directions


def cautious_descent(weights: Sequence[Tensor], updates: Sequence[Tensor], rate: float, decay: float) -> None:
    """The operator's contract is the reference's."""
    for x, u in _alike(weights, updates):
        table, size = addresses(x, [t.data_ptr() for t in u]), x[0].numel()
        types = {"X": _TYPES[x[0].dtype], "U": _TYPES[u[0].dtype]}
        with torch.cuda.device_of(x[0]):
            _descent_kernel[(triton.cdiv(size, BLOCK), len(x))](
                table, len(x), size, float(rate), float(decay), **types, BLOCK=BLOCK, num_warps=8
            )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def _alike(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """The lists cut into groups of one size and dtype."""
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for together in zip(*lists, strict=True):
        if together[0].numel():
            groups.setdefault((together[0].numel(), *(t.dtype for t in together)), []).append(together)
    for group in groups.values():
        yield tuple(map(list, zip(*group, strict=True)))
