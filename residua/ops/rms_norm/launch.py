"""RMSNorm with the additions next to it: launching the kernels.

Forward: read x (or h and y), write the norm (and the sum). Backward: read its gradient (and the sum's) and x, write
one gradient. The scaled norm is PreAffine's, of affine ⊙ x: the same kernels, and nothing more is read or written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import cdiv, on, sum_rows
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


def forward_outputs(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _rows_like(x), x.new_empty(x.shape[:1], dtype=torch.float32)


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed rows [M, C] and rstd [M]."""
    outputs = forward_outputs(x, weight, eps)
    _launch_forward(x, None, x, weight, None, eps, outputs)
    return outputs


def added_outputs(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return *forward_outputs(x, weight, eps), _rows_like(x)


def forward_added(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` of x + update [M, C], then that sum itself, rounded to its dtype."""
    outputs = added_outputs(x, update, weight, eps)
    _launch_forward(x.contiguous(), update.contiguous(), outputs[2], weight, None, eps, outputs[:2])
    return outputs


def scaled_outputs(x: Tensor, weight: Tensor, affine: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return forward_outputs(x, weight, eps)


def forward_scaled(x: Tensor, weight: Tensor, affine: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`forward` of affine ⊙ x."""
    outputs = forward_outputs(x, weight, eps)
    _launch_forward(x, None, x, weight, affine, eps, outputs)
    return outputs


def scaled_added_outputs(
    x: Tensor, update: Tensor, weight: Tensor, affine: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return added_outputs(x, update, weight, eps)


def forward_scaled_added(
    x: Tensor, update: Tensor, weight: Tensor, affine: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` of affine ⊙ (x + update), then that sum itself, rounded to its dtype."""
    outputs = added_outputs(x, update, weight, eps)
    _launch_forward(x.contiguous(), update.contiguous(), outputs[2], weight, affine, eps, outputs[:2])
    return outputs


def _launch_forward(
    x: Tensor, update: Tensor | None, added: Tensor, weight: Tensor, affine: Tensor | None, eps: float,
    outputs: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    tokens, width = x.shape
    if tokens:
        with on(x):
            kernels.forward_kernel[(tokens,)](
                x, x if update is None else update, weight.contiguous(), _or(affine, weight).contiguous(), added,
                *outputs, eps, ADDED=update is not None, SCALED=affine is not None, **forward_plan(width).sizes(width),
            )  # fmt: skip


def backward_outputs(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _rows_like(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


def backward(
    g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; `residual` is added to that of x before it is rounded."""
    outputs = backward_outputs(g, x, weight, rstd)
    _launch_backward(g, x, weight, None, rstd, residual, None, *outputs)
    return outputs


def scaled_backward_outputs(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    g_x, g_weight = backward_outputs(g, x, weight, rstd)
    return g_x, g_weight, torch.empty_like(affine, memory_format=torch.contiguous_format)


def backward_scaled(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor, rstd: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the weight and of affine; `residual` is added to that of x before it is rounded."""
    outputs = scaled_backward_outputs(g, x, weight, affine, rstd)
    _launch_backward(g, x, weight, affine, rstd, residual, None, *outputs)
    return outputs


def dotted_outputs(g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return *backward_outputs(g, x, weight, rstd), torch.empty_like(rstd)


def backward_dotted(g: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`backward`, then the dot product of x with its gradient [M]."""
    outputs = dotted_outputs(g, x, weight, rstd)
    _launch_backward(g, x, weight, None, rstd, None, outputs[2], *outputs[:2])
    return outputs


def _launch_backward(
    g: Tensor, x: Tensor, weight: Tensor, affine: Tensor | None, rstd: Tensor, residual: Tensor | None,
    dots: Tensor | None, g_x: Tensor, *g_weights: Tensor,
) -> None:  # fmt: skip
    """`g_weights` are the gradients of the weight and, if there is one, of affine."""
    tokens, width = x.shape
    plan = backward_plan(width)
    programs = min(tokens, plan.programs * fused.multiprocessors(x))
    partial = x.new_empty((len(g_weights), programs, width), dtype=torch.float32)
    with on(x):
        if tokens:
            kernels.backward_kernel[(programs,)](
                g, g if residual is None else residual.contiguous(), x, weight.contiguous(),
                _or(affine, weight).contiguous(), rstd, g_x, _or(dots, rstd), partial, tokens,
                ADDED=residual is not None, DOTTED=dots is not None, SCALED=affine is not None, **plan.sizes(width),
            )  # fmt: skip
        for rows, g_weight in zip(partial, g_weights, strict=True):
            total = g_weight if g_weight.dtype is torch.float32 else partial.new_empty(width)
            sum_rows(rows, total)
            if total is not g_weight:
                g_weight.copy_(total)


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another one for a pointer that the kernel does not follow."""
    return other if tensor is None else tensor


def _rows_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
