"""The feed-forward with a squared ReLU, fused: relu(·)² and its slope are in the kernels of two of its six products.

With a = relu(x W_inᵀ)², and so relu(x W_inᵀ) = √a:

    y = a W_outᵀ,   p = (g W_out) ⊙ 2√a,   g_x = p W_in,   g_W_in = pᵀ x,   g_W_out = gᵀ a

Of what lies between, a alone is written and kept. The other four are left to the matrix library, where a compiler sees
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime import fused
from residua.ops._runtime.launch import aligned, on, operator
from residua.ops._runtime.numeric import working_dtype
from residua.ops.squared_relu.plans import HAS_GLUON, Flat, Specialized

INTERPRETED = Flat(16, 32, 16, 2, 2, 4, 1)
"""Small tiles: the interpreter's tests have many of them."""


def _plan(flat: Flat, specialized: Specialized) -> Flat | Specialized:
    if fused.INTERPRETED:
        return INTERPRETED
    return specialized if HAS_GLUON else flat


FLAT_FORWARD, FLAT_BACKWARD = Flat(128, 256, 64, 8, 2, 8, 4), Flat(128, 256, 64, 8, 2, 8, 3)
FORWARD = _plan(FLAT_FORWARD, Specialized(256, 64, 4, 2, 1, 8))
BACKWARD = _plan(FLAT_BACKWARD, Specialized(256, 32, 6, 4, 4, 8))


def squared_relu_ffn(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """The fused twin of `reference.squared_relu_ffn`; weights are brought to the products' dtype, as autocast does."""
    dtype = working_dtype(x)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    return _apply(rows, w_in.to(dtype), w_out.to(dtype)).reshape(x.shape)


class _SquaredReluFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        a = squared_relu_linear(x, w_in)
        ctx.save_for_backward(x, w_in, w_out, a)
        return a @ w_out.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out, a = ctx.saved_tensors
        p = squared_relu_linear_backward(g, w_out, a)
        return p @ w_in, p.t() @ x, g.t() @ a


@torch.compiler.allow_in_graph
def _apply(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    y: Tensor = _SquaredReluFFN.apply(x, w_in, w_out)
    return y


def _squares(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@operator("squared_relu_linear(Tensor x, Tensor weight) -> Tensor", _squares)
def squared_relu_linear(x: Tensor, weight: Tensor) -> Tensor:
    """relu(x weightᵀ)² [M, N] of x [M, K] and weight [N, K], summed in float32."""
    a = _squares(x, weight)
    with on(x):
        FORWARD.launch(aligned(x), aligned(weight), None, a)
    return a


def _slopes(g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@operator("squared_relu_linear_backward(Tensor g, Tensor weight, Tensor a) -> Tensor", _slopes)
def squared_relu_linear_backward(g: Tensor, weight: Tensor, a: Tensor) -> Tensor:
    """(g weight) ⊙ 2√a [M, N] of g [M, K], weight [K, N] and a [M, N], summed in float32."""
    p = _slopes(g, weight, a)
    with on(g):
        BACKWARD.launch(aligned(g), aligned(weight), aligned(a), p)
    return p
