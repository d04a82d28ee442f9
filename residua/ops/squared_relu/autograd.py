"""The feed-forward with a squared ReLU, fused: relu(·)² and its slope are in the kernels of two of its six products.

With a = relu(x W_inᵀ)², and so relu(x W_inᵀ) = √a:

    y = a W_outᵀ,   p = (g W_out) ⊙ 2√a,   g_x = p W_in,   g_W_in = pᵀ x,   g_W_out = gᵀ a

Only a is written and kept for the backward pass. The other four products are the matrix library's, where a compiler
sees them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.tracing import in_graph
from residua.ops.squared_relu import launch

squared_relu_linear = operator(
    "squared_relu_linear(Tensor x, Tensor weight) -> Tensor", launch.forward, launch.forward_output
)
squared_relu_linear_backward = operator(
    "squared_relu_linear_backward(Tensor g, Tensor weight, Tensor a) -> Tensor", launch.backward, launch.backward_output
)


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


@in_graph
def _apply(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    y: Tensor = _SquaredReluFFN.apply(x, w_in, w_out)
    return y
