"""RMSNorm fused with adjacent additions: operators, launches and gradients.

Forward: read x (or h and y), write the norm (and the sum). Backward: read its gradient (and the sum's) and x, write one
gradient; it needs only x and one float per token. The scaled norm is PreAffine's, of affine ⊙ x: it uses the same
kernels, which read and write nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, dense_like, either, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.tracing import differentiable
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.rms_norm.kernels")


class RowPlan(NamedTuple):
    """Each program processes one row at a time."""

    warps: int
    programs: int = 0
    """Programs per multiprocessor, for a persistent kernel."""

    def sizes(self, width: int) -> dict[str, int]:
        block = 256 * self.warps
        return {"C": width, "BLOCK": block, "TILES": cdiv(width, block), "num_warps": self.warps}


def forward_plan(width: int) -> RowPlan:
    return RowPlan(4 if width <= 4096 else 8)


def backward_plan(width: int) -> RowPlan:
    """Twelve to sixteen warps per multiprocessor, each with two rows, or parts of rows, in flight."""
    if width <= 1024:
        return RowPlan(1, 12)
    if width < 2048:
        return RowPlan(2, 6)
    return RowPlan(4, 4) if width <= 4096 else RowPlan(8, 2)


@launcher("rms_norm")
def forward(
    x: Tensor, weight: Tensor, eps: float, update: Tensor | None = None, affine: Tensor | None = None
) -> Iterator[list[Tensor]]:
    """The normed rows [M, C] of affine ⊙ (x + update) and rstd [M]; with an update the sum, rounded to x's dtype."""
    outputs = [dense_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)]
    outputs += [] if update is None else [dense_like(x)]
    yield outputs
    tokens, width = x.shape
    if tokens:
        normed, rstd, *sums = outputs
        x, update = (x, x) if update is None else (x.contiguous(), update.contiguous())
        kernels.forward_kernel[(tokens,)](
            x, update, weight.contiguous(), either(affine, weight).contiguous(), *(sums or [x]), normed, rstd, eps,
            ADDED=len(sums) > 0, SCALED=affine is not None, **forward_plan(width).sizes(width),
        )  # fmt: skip


@launcher("rms_norm_backward")
def backward(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None, affine: Tensor | None = None,
    dotted: bool = False,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """The gradients of x, of the weight and of affine, if given. If `dotted`, also x · its gradient per row [M].

    `residual` is added to the gradient of x before rounding.
    """
    g_weights = [dense_like(w) for w in (weight, affine) if w is not None]
    g_x, dots = dense_like(x), torch.empty_like(rstd) if dotted else None
    yield [g_x, *g_weights, *([] if dots is None else [dots])]
    tokens, width = x.shape
    plan = backward_plan(width)
    programs = min(tokens, plan.programs * multiprocessors(x))
    partial = x.new_empty((len(g_weights), programs, width), dtype=torch.float32)
    if tokens:
        kernels.backward_kernel[(programs,)](
            g, g if residual is None else residual.contiguous(), x, weight.contiguous(),
            either(affine, weight).contiguous(), rstd, g_x, either(dots, rstd), partial, tokens,
            ADDED=residual is not None, DOTTED=dotted, SCALED=affine is not None, **plan.sizes(width),
        )  # fmt: skip
    for rows, g_weight in zip(partial, g_weights, strict=True):
        sum_rows(rows, g_weight)


def rms_norm(x: Tensor, weight: Tensor, *, affine: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.rms_norm`."""
    return _rms_norm(x.reshape(-1, x.shape[-1]), weight, affine, eps).reshape(x.shape)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.add_norm`."""
    width = h.shape[-1]
    added, normed = _add_norm(h.reshape(-1, width), y.reshape(-1, width), weight, eps)
    return added.reshape(h.shape), normed.reshape(h.shape)


def _rms_norm_backward(ctx: Any, g: Tensor) -> Sequence[Tensor]:
    *saved, affine = ctx.saved_tensors
    return backward(g.contiguous(), *saved, None, affine)


@differentiable(_rms_norm_backward)
def _rms_norm(ctx: Any, x: Tensor, weight: Tensor, affine: Tensor | None, eps: float) -> Tensor:
    x = x.contiguous()
    normed, rstd = forward(x, weight, eps, None, affine)
    ctx.save_for_backward(x, weight, rstd, affine)
    return normed


def _add_norm_backward(ctx: Any, g_added: Tensor, g_normed: Tensor) -> Sequence[Tensor]:
    g, g_weight = backward(g_normed.contiguous(), *ctx.saved_tensors, g_added)
    return g, g, g_weight


@differentiable(_add_norm_backward)
def _add_norm(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, rstd, added = forward(h, weight, eps, y)
    ctx.save_for_backward(added, weight, rstd)
    return added, normed
