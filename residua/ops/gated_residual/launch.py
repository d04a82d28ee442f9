"""Gated Residual: operators, tile sizes, launches and gradients.

Stored for backward: X', y, inj, and per token n floats, inj' and n·(RANK + 16) numbers p.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.launch import Kernels, cdiv, dense_like, next_power_of_2, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.tracing import differentiable
from residua.ops._runtime.triton_support import multiprocessors
from residua.ops.gated_norm.launch import TilePlan

kernels = Kernels("residua.ops.gated_residual.kernels")

FACTORS = 16
"""Rows of the kernels' matrices for W_inj, padded for matrix products, after RANK rows of W_down and before U's."""


def plans(rank: int, size: int) -> tuple[TilePlan, TilePlan, TilePlan, TilePlan]:
    """The plans of project, gate, reduce and spread for elements of `size` bytes.

    Tiles of 32 rows, because Triton's products of 64 rows or more are asynchronous (`gated_norm/launch.py`).
    """
    if size == 4:
        return TilePlan(32, 32, 8), TilePlan(32, 32, 8, 1, 3), TilePlan(32, 16, 8), TilePlan(16, 16, 8, 1, 2)
    if rank <= 32:
        return TilePlan(32, 32, 2, 2), TilePlan(32, 64, 2, 3, 6), TilePlan(32, 32, 2, 2), TilePlan(32, 32, 4, 2, 2)
    gate = TilePlan(32, 64, 4, 3, 4)
    if rank <= 64:
        return TilePlan(32, 64, 4, 2), gate, TilePlan(32, 64, 4, 2, 0, 160), TilePlan(32, 32, 4, 2, 2)
    return TilePlan(32, 32, 2, 2), gate, TilePlan(32, 32, 8, 2), TilePlan(32, 32, 4, 1, 2)


@launcher("gated_residual")
def forward(
    streams: Tensor, injection: Tensor, update: Tensor, weight: Tensor, matrices: Tensor, eps: float
) -> Iterator[list[Tensor]]:
    """h [M, C], X' [M, n, C], inj' [M, n], p [M, n, RANK + 16] and r [M, n]."""
    (tokens, n, width), rank = streams.shape, (len(matrices) - FACTORS) // 2
    h, after = streams.new_empty((tokens, width)), streams.new_empty((tokens, n, width))
    factors, rstd = (streams.new_empty((tokens, n), dtype=torch.float32) for _ in range(2))
    parts = streams.new_empty((tokens, n, rank + FACTORS))
    yield [h, after, factors, parts, rstd]
    sizes = {"C": width, "N": n, "RANK": rank, "FACTORS": FACTORS}
    project, gate, *_ = plans(rank, streams.element_size())
    hidden = streams.new_empty((tokens, rank))
    if tokens:
        kernels.project_kernel[(project.tiles(tokens),)](
            streams, injection, update, matrices, after, factors, parts, rstd, hidden, tokens, eps,
            **sizes, **project.settings(),
        )  # fmt: skip
        kernels.gate_kernel[gate.shares(h)](
            after, weight, matrices, rstd, hidden, h, tokens, **sizes, **gate.settings()
        )


@launcher("gated_residual_backward")
def backward(
    g: Tensor, g_after: Tensor, g_factors: Tensor, injection: Tensor, update: Tensor, weight: Tensor, matrices: Tensor,
    after: Tensor, factors: Tensor, parts: Tensor, rstd: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of the streams, of inj and of y, and one of w and of the matrices [1 + 2·RANK + 16, n, C]."""
    (tokens, n, width), rank = after.shape, (len(matrices) - FACTORS) // 2
    g_weights = torch.empty((1 + len(matrices), n, width), dtype=torch.float32, device=g.device)
    outputs = dense_like(after), dense_like(injection), dense_like(update), g_weights
    yield outputs
    g_streams, g_injection, g_update, _ = outputs
    sizes = {"C": width, "N": n, "RANK": rank, "FACTORS": FACTORS}
    *_, reduce, spread = plans(rank, after.element_size())
    hidden, d, m = after.new_empty((tokens, rank)), after.new_empty((tokens, rank + FACTORS)), torch.empty_like(rstd)
    blocks = cdiv(width, spread.block)
    shares = max(1, min(spread.programs * multiprocessors(g) // (blocks * n), spread.tiles(tokens)))
    partial = torch.empty((shares, g_weights.numel()), dtype=torch.float32, device=g.device)
    if tokens:
        kernels.reduce_kernel[(reduce.tiles(tokens),)](
            g, g_factors, after, weight, matrices, factors, parts, rstd, hidden, d, m, tokens,
            **sizes, **reduce.settings(),
        )  # fmt: skip
    kernels.spread_kernel[(blocks, n, shares)](
        g, g_after, after, weight, matrices, rstd, hidden, d, m, g_streams, partial, tokens,
        **sizes, **spread.settings(),
    )  # fmt: skip
    if tokens:
        kernels.write_backward_kernel[(cdiv(tokens, 16),)](
            g_streams, injection, update, g_update, g_injection, tokens,
            C=width, N=n, FACTORS=FACTORS, TOKENS=16, BLOCK=128,
        )  # fmt: skip
    sum_rows(partial, g_weights)


def gated_residual(
    streams: Tensor, injection: Tensor, update: Tensor, gain: Tensor, down: Tensor, up: Tensor,
    inject: Tensor | None = None, *, eps: float = 1e-6,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The fused twin of `reference.gated_residual`. Autograd differentiates the preparation of the weights."""
    n, width = gain.shape
    rank, weight = max(16, next_power_of_2(len(down))), gain.float() / n
    rows = zip((down, down[:0] if inject is None else inject, up.t()), (rank, FACTORS, rank), strict=True)
    padded = [pad(x.float(), (0, 0, 0, most - len(x))).unflatten(1, gain.shape) for x, most in rows]
    matrices = torch.cat([padded[0] * weight, padded[1] * weight, padded[2]])
    h, after, factors, *_ = _step(
        streams.reshape(-1, n, width), injection.reshape(-1, n), update.reshape(-1, width), weight, matrices, eps
    )
    made = (h.view_as(update), after.view_as(streams), factors.view_as(injection))
    return made[:2] if inject is None else made


def _step_backward(ctx: Any, g: Tensor, g_after: Tensor, g_factors: Tensor, *_: Tensor) -> Sequence[Tensor]:
    given = (x.contiguous() for x in (g, g_after, g_factors))
    *g_inputs, g_weights = backward(*given, *ctx.saved_tensors)
    return *g_inputs, g_weights[0], g_weights[1:]


@differentiable(_step_backward)
def _step(
    ctx: Any, streams: Tensor, injection: Tensor, update: Tensor, weight: Tensor, matrices: Tensor, eps: float
) -> tuple[Tensor, ...]:
    injection, update, matrices = injection.contiguous(), update.contiguous(), matrices.to(streams.dtype)
    made = forward(streams.contiguous(), injection, update, weight, matrices, eps)
    ctx.mark_non_differentiable(*made[3:])
    ctx.save_for_backward(injection, update, weight, matrices, *made[1:])
    return tuple(made)
