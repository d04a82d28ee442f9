"""RMSNorm, fused: operators and gradients. Only x and one float per token are kept for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.tracing import in_graph
from residua.ops.rms_norm import launch

forward = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", launch.forward, launch.forward_outputs
)
forward_added = operator(
    "rms_norm_added(Tensor x, Tensor update, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    launch.forward_added,
    launch.added_outputs,
)
backward = operator(
    "rms_norm_backward(Tensor g, Tensor x, Tensor weight, Tensor rstd, Tensor? residual=None) -> (Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)
forward_scaled = operator(
    "scaled_rms_norm(Tensor x, Tensor weight, Tensor affine, float eps) -> (Tensor, Tensor)",
    launch.forward_scaled,
    launch.scaled_outputs,
)
forward_scaled_added = operator(
    "scaled_rms_norm_added(Tensor x, Tensor update, Tensor weight, Tensor affine, float eps)"
    " -> (Tensor, Tensor, Tensor)",
    launch.forward_scaled_added,
    launch.scaled_added_outputs,
)
backward_scaled = operator(
    "scaled_rms_norm_backward(Tensor g, Tensor x, Tensor weight, Tensor affine, Tensor rstd, Tensor? residual=None)"
    " -> (Tensor, Tensor, Tensor)",
    launch.backward_scaled,
    launch.scaled_backward_outputs,
)
backward_dotted = operator(
    "rms_norm_backward_dotted(Tensor g, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    launch.backward_dotted,
    launch.dotted_outputs,
)


def rms_norm(x: Tensor, weight: Tensor, *, affine: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    normed = _apply(rows, weight, eps) if affine is None else _apply_scaled(rows, weight, affine, eps)
    return normed.reshape(x.shape)


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.add_norm`."""
    width = h.shape[-1]
    added, normed = _apply_sum(h.reshape(-1, width), y.reshape(-1, width), weight, eps)
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


@in_graph
def _apply(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = _RMSNorm.apply(x, weight, eps)
    return out


@in_graph
def _apply_scaled(x: Tensor, weight: Tensor, affine: Tensor, eps: float) -> Tensor:
    out: Tensor = _ScaledRMSNorm.apply(x, weight, affine, eps)
    return out


@in_graph
def _apply_sum(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _AddNorm.apply(h, y, weight, eps)
    return out
