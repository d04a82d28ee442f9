"""Routing, fused: the router's product, its softmax, the choices, the order of the slots, and all sums over tokens.

Logits and choices are kept for the backward pass, a few floats per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.tracing import in_graph
from residua.ops.expert_routing import launch
from residua.ops.expert_routing.reference import Routed

forward = operator(
    "expert_routing(Tensor x, Tensor weight, Tensor? bias, SymInt top_k, bool normalize, bool sigmoid, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.forward,
    launch.forward_outputs,
)
backward = operator(
    "expert_routing_backward(Tensor g_weights, Tensor g_probability, Tensor g_z, Tensor x, Tensor weight,"
    " Tensor logits, Tensor chosen, bool normalize, bool sigmoid, float scale) -> (Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)


def route(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    score: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> Routed:
    """The fused twin of `reference.route`."""
    return Routed(*_apply(x, weight, bias, top_k, normalize, score == "sigmoid", scale))


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, normalize: bool, sigmoid: bool,
        scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        *routed, logits = forward(x, weight, bias, top_k, normalize, sigmoid, scale)
        _, chosen, order, ends, load, _, _ = routed
        ctx.save_for_backward(x, weight, logits, chosen)
        ctx.settings = normalize, sigmoid, scale
        ctx.mark_non_differentiable(chosen, order, ends, load)
        return tuple(routed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        g_weights, *_, g_probability, g_z = g
        return *backward(g_weights, g_probability, g_z, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


@in_graph
def _apply(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, normalize: bool, sigmoid: bool, scale: float
) -> tuple[Tensor, ...]:
    routed: tuple[Tensor, ...] = _Route.apply(x, weight, bias, top_k, normalize, sigmoid, scale)
    return routed
