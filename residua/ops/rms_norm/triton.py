"""RMSNorm, fused, with the additions beside it.

Forward: read x (or h and y), write the norm (and the sum). Backward: read its gradient (and the sum's) and x, write
one gradient. Nothing but x and one float per token is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime import fused
from residua.ops._runtime.launch import divided, on, operator
from residua.ops._runtime.partials import sum_rows
from residua.ops.rms_norm import kernels


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The operator's contract is the reference's."""
    return _apply(x.reshape(-1, x.shape[-1]), weight, eps).reshape(x.shape)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The operator's contract is the reference's."""
    width = h.shape[-1]
    added, normed = _apply_sum(h.reshape(-1, width), y.reshape(-1, width), weight, eps)
    return added.reshape(h.shape), normed.reshape(h.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        normed, rstd = _forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(g.contiguous(), *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, rstd, added = _forward_added(h, y, weight, eps)
        ctx.save_for_backward(added, weight, rstd)
        return added, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_added: Tensor, g_normed: Tensor) -> tuple[Tensor | None, ...]:
        g, g_weight = _backward(g_normed.contiguous(), *ctx.saved_tensors, g_added)
        return g, g, g_weight, None


@torch.compiler.allow_in_graph
def _apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


@torch.compiler.allow_in_graph
def _apply_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _AddNorm.apply(h, y, weight, eps)
    return out


def _forward_outputs(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rows_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)


def _rows_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _forward_outputs)
def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows [M, C] and rstd [M]."""
    outputs = _forward_outputs(x, weight, eps)
    _launch_forward(x, None, x, weight, eps, outputs)
    return outputs


def _added_outputs(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return *_forward_outputs(x, weight, eps), _rows_like(x)


@operator(
    "rms_norm_added(Tensor x, Tensor update, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)", _added_outputs
)
def _forward_added(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """What `rms_norm` gives for x + update [M, C], and then that sum itself, rounded to its dtype as any sum is."""
    outputs = _added_outputs(x, update, weight, eps)
    _launch_forward(x.contiguous(), update.contiguous(), outputs[2], weight, eps, outputs[:2])
    return outputs


def _launch_forward(
    x: Tensor, update: Tensor | None, added: Tensor, weight: Tensor, eps: float, outputs: tuple[Tensor, Tensor]
) -> None:
    tokens, width = x.shape
    if tokens:
        with on(x):
            kernels.forward_kernel[(tokens,)](
                x, x if update is None else update, weight.contiguous(), added, *outputs, eps,
                ADDED=update is not None, **forward_plan(width).sizes(width),
            )  # fmt: skip


def _backward_outputs(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _rows_like(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


@operator(
    "rms_norm_backward(Tensor g, Tensor x, Tensor weight, Tensor rstd, Tensor? residual=None) -> (Tensor, Tensor)",
    _backward_outputs,
)
def _backward(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; to that of x the `residual` is added, before it is rounded."""
    outputs = _backward_outputs(g, x, weight, rstd)
    _launch_backward(g, x, weight, rstd, residual, None, outputs)
    return outputs


def _dotted_outputs(g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *_backward_outputs(g, x, weight, rstd), torch.empty_like(rstd)


@operator(
    "rms_norm_backward_dotted(Tensor g, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    _dotted_outputs,
)
def _backward_dotted(g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `rms_norm_backward` gives, and then the dot product of x with its gradient, [M]."""
    outputs = _dotted_outputs(g, x, weight, rstd)
    _launch_backward(g, x, weight, rstd, None, outputs[2], outputs[:2])
    return outputs


def _launch_backward(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None, dots: Tensor | None,
    outputs: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    g_x, g_weight = outputs
    tokens, width = x.shape
    plan = backward_plan(width)
    partial = x.new_empty((min(tokens, plan.programs * fused.multiprocessors(x)), width), dtype=torch.float32)
    total = g_weight if g_weight.dtype is torch.float32 else partial.new_empty(width)
    with on(x):
        if tokens:
            kernels.backward_kernel[(len(partial),)](
                g, g if residual is None else residual.contiguous(), x, weight.contiguous(), rstd, g_x,
                rstd if dots is None else dots, partial, tokens, ADDED=residual is not None, DOTTED=dots is not None,
                **plan.sizes(width),
            )  # fmt: skip
        sum_rows(partial, total)
    if total is not g_weight:
        g_weight.copy_(total)


class Plan(NamedTuple):
    """One row to a program at a time."""

    warps: int
    programs: int = 0
    """Per multiprocessor, of a kernel whose programs stay."""

    def sizes(self, width: int) -> dict[str, int]:
        block = 256 * self.warps
        return {"C": width, "BLOCK": block, "TILES": divided(width, block), "num_warps": self.warps}


def forward_plan(width: int) -> Plan:
    return Plan(4 if width <= 4096 else 8)


def backward_plan(width: int) -> Plan:
    """Twelve to sixteen warps to a multiprocessor, each with two rows, or shares of them, on their way."""
    if width <= 1024:
        return Plan(1, 12)
    if width < 2048:
        return Plan(2, 6)
    return Plan(4, 4) if width <= 4096 else Plan(8, 2)
