"""GatedNorm, fused: operators and gradients. Kept for backward: x, and one float and RANK numbers per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.tracing import in_graph
from residua.ops.gated_norm import launch

forward = operator(
    "gated_norm(Tensor x, Tensor weight, Tensor down, Tensor up, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    launch.forward,
    launch.forward_outputs,
)
forward_added = operator(
    "gated_norm_added(Tensor x, Tensor update, Tensor weight, Tensor down, Tensor up, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.forward_added,
    launch.added_outputs,
)
backward = operator(
    "gated_norm_backward(Tensor g, Tensor x, Tensor weight, Tensor down, Tensor up, Tensor small, Tensor rstd, "
    "Tensor bottleneck, Tensor? residual=None) -> (Tensor, Tensor, Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)


def gated_norm(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, eps: float = 1e-6, **_: str) -> Tensor:
    """The fused twin of `reference.gated_norm`; the predicate has checked that the gate is one sigmoid per channel."""
    rows = x.reshape(-1, x.shape[-1])
    return _apply(rows, weight, down, up, eps).reshape(x.shape)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, small, rstd, bottleneck = forward(x, weight, down, up, eps)
        ctx.save_for_backward(x, weight, down, up, small, rstd, bottleneck)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(g.contiguous(), *ctx.saved_tensors), None


@in_graph
def _apply(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> Tensor:
    out: Tensor = _GatedNorm.apply(x, weight, down, up, eps)
    return out
