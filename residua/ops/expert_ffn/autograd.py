"""The feed-forwards of experts, fused: six grouped products, with the permutation and the activation inside them.

With the rows s of expert e, their tokens t(s), weights v_s and gradients g of the tokens' results:

    z_s = W_up x_t(s),   a_s = v_s act(z_s),   y_t = Σ_{s of t} W_out a_s
    p_s = W_outᵀ g_t(s),   g_z,s = v_s p_s ⊙ act′(z_s),   g_v,s = p_s · act(z_s)
    g_x,t = Σ_{s of t} W_upᵀ g_z,s,   g_W_up = Σ_s g_z,s x_t(s)ᵀ,   g_W_out = Σ_s g_t(s) a_sᵀ

Rows of tokens are read through the order of the slots, and results are written to the slots in token-major order, where
a token's sum is over neighbours: no row is copied by itself, and no sum depends on which program comes first. Only z is
kept, or of relu² only a. The sums over a token's slots are plain PyTorch, where a compiler adds what follows them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.tracing import in_graph
from residua.ops.expert_ffn import launch

expert_tiles = operator(
    "expert_tiles(Tensor x, Tensor ends, SymInt slots) -> Tensor", launch.tiles, launch.tiles_output
)
expert_up = operator(
    "expert_up(Tensor x, Tensor weight, Tensor? order, Tensor tiles, Tensor? weights, str activation, SymInt choices,"
    " bool keep) -> (Tensor, Tensor)",
    launch.up,
    launch.up_outputs,
)
expert_product = operator(
    "expert_product(Tensor x, Tensor weight, Tensor? order, Tensor tiles, bool turned) -> Tensor",
    launch.product,
    launch.product_output,
)
expert_slope = operator(
    "expert_slope(Tensor g, Tensor weight, Tensor? order, Tensor tiles, Tensor? weights, Tensor kept, str activation,"
    " SymInt choices) -> (Tensor, Tensor, Tensor)",
    launch.slope,
    launch.slope_outputs,
)
expert_weight_gradients = operator(
    "expert_weight_gradients(Tensor g, Tensor a, Tensor g_z, Tensor x, Tensor? order, Tensor ends, SymInt choices)"
    " -> (Tensor, Tensor)",
    launch.weight_gradients,
    launch.weight_outputs,
)


def expert_ffn(
    x: Tensor,
    up: Tensor,
    out: Tensor,
    ends: Tensor,
    activation: str,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The fused twin of `reference.expert_ffn`; matrices are brought to the products' dtype, as autocast does."""
    dtype = working_dtype(x)
    x, up, out = x.to(dtype), up.to(dtype), out.to(dtype)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, up, out, weights))
    ends = ends.to(torch.int32)
    if order is None or weights is None:
        return _apply(x, up, out, None, None, ends, activation, keep)
    return _apply(x, up, out, weights, order.to(torch.int32), ends, activation, keep)


class _ExpertFFN(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, out: Tensor, weights: Tensor | None, order: Tensor | None, ends: Tensor,
        activation: str, keep: bool,
    ) -> Tensor:  # fmt: skip
        choices = 1 if weights is None else weights.shape[1]
        flat = None if weights is None else weights.reshape(-1)
        tiles = expert_tiles(x, ends, len(x) * choices)
        squared = activation == "relu2"
        a, z = expert_up(x, up, order, tiles, flat, activation, choices, keep and not squared)
        y = expert_product(a, out, order, tiles, False)
        ctx.save_for_backward(x, up, out, weights, order, ends, tiles, a if squared else z)
        ctx.activation, ctx.choices = activation, choices
        return _by_token(y, choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, up, out, weights, order, ends, tiles, kept = ctx.saved_tensors
        choices = ctx.choices
        flat = None if weights is None else weights.reshape(-1)
        g = g.to(x.dtype).contiguous()
        g_z, a, dots = expert_slope(g, out, order, tiles, flat, kept, ctx.activation, choices)
        a = kept if ctx.activation == "relu2" else a
        g_out, g_up = expert_weight_gradients(g, a, g_z, x, order, ends, choices)
        g_x = _by_token(expert_product(g_z, up, order, tiles, True), choices)
        g_weights = None if weights is None else dots.sum(0).view_as(weights).to(weights.dtype)
        return g_x, g_up, g_out, g_weights, None, None, None, None


def _by_token(y: Tensor, choices: int) -> Tensor:
    """The sums over the slots of each token; autocast would return them in float32."""
    return y if choices == 1 else y.unflatten(0, (-1, choices)).sum(1, dtype=y.dtype)


@in_graph
def _apply(
    x: Tensor, up: Tensor, out: Tensor, weights: Tensor | None, order: Tensor | None, ends: Tensor, activation: str,
    keep: bool,
) -> Tensor:  # fmt: skip
    y: Tensor = _ExpertFFN.apply(x, up, out, weights, order, ends, activation, keep)
    return y
