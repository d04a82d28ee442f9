"""Momentum and descent: launching the kernels, which read and write each tensor once.

Bytes per weight: 14 for the momentum (g; m twice; a bf16 direction) and 10 for the descent (x twice; a bf16 update);
list operations move 30 and 60. AdamW moves 24 (g; m and v twice; a float32 update) and 12; list operations move 60 for
the first, which matters for large token tables. Tensors of one size share a launch and a table of addresses. A number
may be a float64 tensor on the device, which the kernels read: so CUDA graphs of an update stay valid while it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, addresses, aligned, cdiv, device_guard, triton_type
from residua.ops._runtime.triton_support import INTERPRETED

kernels = Kernels("residua.ops.optimizer_update.kernels")

BLOCK = 65536 if INTERPRETED else 4096

Number = float | Tensor


def momentum_directions(
    momenta: Sequence[Tensor], gradients: Sequence[Tensor], beta: float, dtype: torch.dtype
) -> list[Tensor]:
    """The fused twin of the reference."""
    directions = [torch.empty_like(m, dtype=dtype) for m in momenta]
    for m, g, d in _alike(momenta, [*map(aligned, gradients)], directions):
        table, size = addresses(m, [t.data_ptr() for t in (*g, *d)]), m[0].numel()
        types = {"M": triton_type(m[0].dtype), "G": triton_type(g[0].dtype), "D": triton_type(dtype)}
        with device_guard(m[0]):
            kernels.momentum_kernel[(cdiv(size, BLOCK), len(m))](
                table, len(m), size, float(beta), **types, BLOCK=BLOCK, num_warps=8
            )
    return directions


def adam_directions(
    means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor], betas: tuple[float, float],
    eps: Number,
) -> list[Tensor]:  # fmt: skip
    """The fused twin of the reference."""
    updates = [torch.empty_like(m) for m in means]
    for m, v, g, u in _alike(means, squares, [*map(aligned, gradients)], updates):
        table, size = addresses(m, [t.data_ptr() for t in (*v, *g, *u)]), m[0].numel()
        with device_guard(m[0]):
            kernels.adam_kernel[(cdiv(size, BLOCK), len(m))](
                table, len(m), size, float(betas[0]), float(betas[1]), _number(eps),
                M=triton_type(m[0].dtype), G=triton_type(g[0].dtype), LOADED=isinstance(eps, Tensor), BLOCK=BLOCK,
                num_warps=8,
            )  # fmt: skip
    return updates


def _descend(cautious: bool, weights: Sequence[Tensor], updates: Sequence[Tensor], rate: Number, decay: Number) -> None:
    """The fused twin of `cautious_descent` and of `plain_descent`."""
    for x, u in _alike(weights, [*map(aligned, updates)]):
        table, size = addresses(x, [t.data_ptr() for t in u]), x[0].numel()
        types = {"X": triton_type(x[0].dtype), "U": triton_type(u[0].dtype)}
        with device_guard(x[0]):
            kernels.descent_kernel[(cdiv(size, BLOCK), len(x))](
                table, len(x), size, _number(rate), _number(decay), **types, CAUTIOUS=cautious,
                LOADED=isinstance(rate, Tensor), BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip


cautious_descent, plain_descent = partial(_descend, True), partial(_descend, False)


def _number(value: Number) -> Number:
    return value if isinstance(value, Tensor) else float(value)


def _alike(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Split the lists into groups of one size and dtype."""
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for together in zip(*lists, strict=True):
        if together[0].numel():
            groups.setdefault((together[0].numel(), *(t.dtype for t in together)), []).append(together)
    for group in groups.values():
        yield tuple(map(list, zip(*group, strict=True)))
