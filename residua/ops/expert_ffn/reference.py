"""The feed-forwards of experts in plain PyTorch: gather the rows of each expert, multiply, sum per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu

from residua.ops.expert_slots import combine, dispatch, slots_of
from residua.ops.grouped_linear import grouped_linear
from residua.ops.inference import reference as dense

LIMIT, SLOPE = 7.0, 1.702


def clamped_gate(gate: Tensor) -> Tensor:
    """g σ(1.702 g), g = min(gate, 7)."""
    g = gate.clamp(max=LIMIT)
    return g * torch.sigmoid(SLOPE * g)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """(clip(up, ±7) + 1) ⊙ g σ(1.702 g), g = min(gate, 7) (gpt-oss)."""
    return (up.clamp(-LIMIT, LIMIT) + 1) * clamped_gate(gate)


ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    **dense.ACTIVATIONS,
    "geglu": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": clamped_swiglu,
}
GATED = (*dense.GATED, "geglu", "clamped_swiglu")
"""Activations with two arguments: `up` holds the rows of the gate, then those of the linear branch."""


def expert_ffn(
    x: Tensor,
    up: Tensor,
    out: Tensor,
    ends: Tensor,
    activation: str,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    up_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
) -> Tensor:
    """y_s = W_out,e act(W_up,e x_s) for the rows s of expert e, from ends[e − 1] (or 0) up to ends[e].

    up [E, R, C], R = 2H (gate, then up) if the activation has a gate, else H; out [E, C, H]; ends [E], int32. Without
    an order, x [slots, C] is sorted by expert, and so is the result. With order [N·k] and weights [N, k], x [N, C] are
    tokens, each of which visits k experts: order holds the slot (token · k + choice) of each sorted row, and the result
    [N, C] is Σ over a token's slots of weight · y. Biases up_bias [E, R] and out_bias [E, C] are added to the products.
    """
    if order is None or weights is None:
        return _sorted_ffn(x, up, out, ends, activation, up_bias, out_bias)
    slots = slots_of(order, ends, weights.shape[1])
    return combine(_sorted_ffn(dispatch(x, slots), up, out, ends, activation, up_bias, out_bias), weights, slots)


def _sorted_ffn(
    x: Tensor, up: Tensor, out: Tensor, ends: Tensor, activation: str, up_bias: Tensor | None, out_bias: Tensor | None
) -> Tensor:
    return biased_rows(grouped_linear(expert_hidden(x, up, ends, activation, up_bias), out, ends), out_bias, ends)


def expert_hidden(x: Tensor, up: Tensor, ends: Tensor, activation: str, bias: Tensor | None = None) -> Tensor:
    """act(W_up,e x_s) [slots, H] for sorted rows x [slots, C]: the input of the experts' last matrices."""
    parts = biased_rows(grouped_linear(x, up, ends), bias, ends).chunk(2 if activation in GATED else 1, -1)
    return ACTIVATIONS[activation](*parts)


def biased_rows(y: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Add to each sorted row of y [slots, R] its expert's bias [E, R]."""
    if bias is None:
        return y
    slots = torch.arange(len(y), device=y.device, dtype=ends.dtype)
    return y + bias.to(y.dtype)[torch.searchsorted(ends, slots, right=True).clamp(max=len(bias) - 1)]
