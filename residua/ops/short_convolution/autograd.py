"""Short convolution, fused: operators and gradients. Kept for backward: the projection and the weight.

The operator takes the projection unsplit and passes the gate's columns on, so that the gradient of the projection is
written in one piece, where a split would end in a concatenation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.numeric import begins
from residua.ops._runtime.tracing import in_graph
from residua.ops.short_convolution import launch

_forward = operator(
    "convolve_heads(Tensor projected, Tensor weight, Tensor? begins, int key_heads, int value_heads, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    launch.forward,
    launch.forward_outputs,
)
_backward = operator(
    "convolve_heads_backward(Tensor dq, Tensor dk, Tensor dv, Tensor dz, Tensor projected, Tensor weight, "
    "Tensor? begins, float eps) -> (Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)

Heads = tuple[Tensor, Tensor, Tensor, Tensor]


def convolve_heads(
    projected: Tensor,
    weight: Tensor,
    key_heads: int,
    value_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> Heads:
    """The fused twin of `reference.convolve_heads`."""
    first = None if segments is None else begins(projected, segments).to(torch.uint8)
    return _apply(projected, weight, first, key_heads, value_heads, eps)


class _ConvolveHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, first: Tensor | None, key_heads: int, value_heads: int, eps: float
    ) -> Heads:
        ctx.save_for_backward(projected, weight, first)
        ctx.eps = eps
        q, k, v = _forward(projected, weight, first, key_heads, value_heads, eps)
        return q, k, v, projected[..., weight.shape[1] :].unflatten(-1, v.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, first = ctx.saved_tensors
        d_projected, d_weight = _backward(dq, dk, dv, dz, projected, weight, first, ctx.eps)
        return d_projected, d_weight.to(weight.dtype), None, None, None, None


@in_graph
def _apply(
    projected: Tensor, weight: Tensor, first: Tensor | None, key_heads: int, value_heads: int, eps: float
) -> Heads:
    made: Heads = _ConvolveHeads.apply(projected, weight, first, key_heads, value_heads, eps)
    return made
