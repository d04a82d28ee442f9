"""RMSNorm with the additions next to it: operators, launches and gradients.

Forward: read x (or h and y), write the norm (and the sum). Backward: read its gradient (and the sum's) and x, write
one gradient; only x and one float per token are kept for it. The scaled norm is PreAffine's, of affine ⊙ x: the same
kernels, and nothing more is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.launch import cdiv, dense_like, device_guard, either, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.tracing import opaque
from residua.ops._runtime.triton_support import multiprocessors
from residua.ops.rms_norm import kernels


class RowPlan(NamedTuple):
    """A program takes one row at a time."""

    warps: int
    programs: int = 0
    """Programs per multiprocessor, of a persistent kernel."""

    def sizes(self, width: int) -> dict[str, int]:
        block = 256 * self.warps
        return {"C": width, "BLOCK": block, "TILES": cdiv(width, block), "num_warps": self.warps}


def forward_plan(width: int) -> RowPlan:
    return RowPlan(4 if width <= 4096 else 8)


def backward_plan(width: int) -> RowPlan:
    """Twelve to sixteen warps per multiprocessor, each with two rows, or shares of them, in flight."""
    if width <= 1024:
        return RowPlan(1, 12)
    if width < 2048:
        return RowPlan(2, 6)
    return RowPlan(4, 4) if width <= 4096 else RowPlan(8, 2)


@launcher("rms_norm")
def forward(x: Tensor, weight: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The normed rows [M, C] and rstd [M]."""
    outputs = _normed_like(x)
    yield outputs
    _launch_forward(x, None, x, weight, None, eps, *outputs)


@launcher("rms_norm_added")
def forward_added(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`forward` of x + update [M, C], then that sum itself, rounded to its dtype."""
    (normed, rstd), added = _normed_like(x), dense_like(x)
    yield normed, rstd, added
    _launch_forward(x.contiguous(), update.contiguous(), added, weight, None, eps, normed, rstd)


@launcher("scaled_rms_norm")
def forward_scaled(x: Tensor, weight: Tensor, affine: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    """`forward` of affine ⊙ x."""
    outputs = _normed_like(x)
    yield outputs
    _launch_forward(x, None, x, weight, affine, eps, *outputs)


@launcher("scaled_rms_norm_added")
def forward_scaled_added(
    x: Tensor, update: Tensor, weight: Tensor, affine: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`forward` of affine ⊙ (x + update), then that sum itself, rounded to its dtype."""
    (normed, rstd), added = _normed_like(x), dense_like(x)
    yield normed, rstd, added
    _launch_forward(x.contiguous(), update.contiguous(), added, weight, affine, eps, normed, rstd)


def _launch_forward(
    x: Tensor, update: Tensor | None, added: Tensor, weight: Tensor, affine: Tensor | None, eps: float,
    normed: Tensor, rstd: Tensor,
) -> None:  # fmt: skip
    tokens, width = x.shape
    if tokens:
        with device_guard(x):
            kernels.forward_kernel[(tokens,)](
                x, either(update, x), weight.contiguous(), either(affine, weight).contiguous(), added, normed, rstd,
                eps, ADDED=update is not None, SCALED=affine is not None, **forward_plan(width).sizes(width),
            )  # fmt: skip


@launcher("rms_norm_backward")
def backward(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of x and of the weight; `residual` is added to that of x before it is rounded."""
    outputs = dense_like(x), dense_like(weight)
    yield outputs
    _launch_backward(g, x, weight, None, rstd, residual, None, *outputs)


@launcher("scaled_rms_norm_backward")
def backward_scaled(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The gradients of x, of the weight and of affine; `residual` is added to that of x before it is rounded."""
    outputs = dense_like(x), dense_like(weight), dense_like(affine)
    yield outputs
    _launch_backward(g, x, weight, affine, rstd, residual, None, *outputs)


@launcher("rms_norm_backward_dotted")
def backward_dotted(g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """`backward`, then the dot product of x with its gradient [M]."""
    g_x, g_weight, dots = dense_like(x), dense_like(weight), torch.empty_like(rstd)
    yield g_x, g_weight, dots
    _launch_backward(g, x, weight, None, rstd, None, dots, g_x, g_weight)


def _launch_backward(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor | None, rstd: Tensor, residual: Tensor | None,
    dots: Tensor | None, g_x: Tensor, *g_weights: Tensor,
) -> None:  # fmt: skip
    """`g_weights` are the gradients of the weight and, if there is one, of affine."""
    tokens, width = x.shape
    plan = backward_plan(width)
    programs = min(tokens, plan.programs * multiprocessors(x))
    partial = x.new_empty((len(g_weights), programs, width), dtype=torch.float32)
    with device_guard(x):
        if tokens:
            kernels.backward_kernel[(programs,)](
                g, g if residual is None else residual.contiguous(), x, weight.contiguous(),
                either(affine, weight).contiguous(), rstd, g_x, either(dots, rstd), partial, tokens,
                ADDED=residual is not None, DOTTED=dots is not None, SCALED=affine is not None, **plan.sizes(width),
            )  # fmt: skip
        for rows, g_weight in zip(partial, g_weights, strict=True):
            total = g_weight if g_weight.dtype is torch.float32 else partial.new_empty(width)
            sum_rows(rows, total)
            if total is not g_weight:
                g_weight.copy_(total)


def _normed_like(x: Tensor) -> tuple[Tensor, Tensor]:
    return dense_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)


def rms_norm(x: Tensor, weight: Tensor, *, affine: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    normed: Tensor = _rms_norm(rows, weight, eps) if affine is None else _scaled_rms_norm(rows, weight, affine, eps)
    return normed.reshape(x.shape)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.add_norm`."""
    width = h.shape[-1]
    added, normed = _add_norm(h.reshape(-1, width), y.reshape(-1, width), weight, eps)
    return added.reshape(h.shape), normed.reshape(h.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(g.contiguous(), *ctx.saved_tensors), None


class _ScaledRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, affine: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, rstd = forward_scaled(x, weight, affine, eps)
        ctx.save_for_backward(x, weight, affine, rstd)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *backward_scaled(g.contiguous(), *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rstd, added = forward_added(h, y, weight, eps)
        ctx.save_for_backward(added, weight, rstd)
        return added, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_added: Tensor, g_normed: Tensor) -> tuple[Tensor | None, ...]:
        g, g_weight = backward(g_normed.contiguous(), *ctx.saved_tensors, g_added)
        return g, g, g_weight, None


_rms_norm, _scaled_rms_norm, _add_norm = opaque(_RMSNorm), opaque(_ScaledRMSNorm), opaque(_AddNorm)
