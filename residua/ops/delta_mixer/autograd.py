"""Gated DeltaNet between its projections, fused: operators and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.numeric import begins
from residua.ops._runtime.tracing import in_graph
from residua.ops.delta_mixer import launch

_forward = operator(
    "delta_mixer(Tensor projected, Tensor g, Tensor beta, Tensor convolution, Tensor gain, Tensor? begins, "
    "int key_heads, float eps, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.forward,
    launch.forward_outputs,
)
_backward = operator(
    "delta_mixer_backward(Tensor dy, Tensor? d_last, Tensor projected, Tensor convolution, Tensor gain, "
    "Tensor? begins, Tensor q, Tensor k, Tensor v, Tensor o, Tensor inverse, Tensor reads, Tensor rates, "
    "Tensor states, Tensor u, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)


def delta_mixer(
    projected: Tensor,
    g: Tensor,
    beta: Tensor,
    convolution: Tensor,
    gain: Tensor,
    key_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.delta_mixer`."""
    first = None if segments is None else begins(projected, segments).to(torch.uint8)
    given = projected, g.float(), beta.float(), convolution, gain
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    return _apply(*given, first, key_heads, eps, keep)


class _DeltaMixer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, first: Tensor | None,
        key_heads: int, eps: float, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, last, *kept = _forward(projected, g, beta, convolution, gain, first, key_heads, eps, keep)
        ctx.save_for_backward(projected, convolution, gain, first, *kept)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None and d_last is None:
            return (None,) * 9
        projected, convolution, gain, first, *kept = ctx.saved_tensors
        dy = torch.zeros_like(kept[3]) if dy is None else dy
        *gradients, d_convolution, d_gain = _backward(dy, d_last, projected, convolution, gain, first, *kept, ctx.eps)
        d_weights = d_convolution.to(convolution.dtype), d_gain.to(gain.dtype)
        return *gradients, *d_weights, None, None, None, None


@in_graph
def _apply(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, first: Tensor | None,
    key_heads: int, eps: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    made: tuple[Tensor, Tensor] = _DeltaMixer.apply(projected, g, beta, convolution, gain, first, key_heads, eps, keep)
    return made
