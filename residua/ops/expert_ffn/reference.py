"""The feed-forwards of experts in plain PyTorch: gather the rows of each expert, multiply, add up by token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import gelu

from residua.ops.expert_slots import combine, dispatch, slots_of
from residua.ops.grouped_linear import grouped_linear
from residua.ops.inference import reference as dense

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    **dense.ACTIVATIONS,
    "geglu": lambda gate, up: gelu(gate, approximate="tanh") * up,
}
GATED = (*dense.GATED, "geglu")
"""Activations of two arguments: the rows of `up` are those of the gate, then those of the linear branch."""


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
    """y_s = W_out,e act(W_up,e x_s) for the rows s of expert e, those from ends[e − 1] (or 0) up to ends[e].

    up [E, R, C], R = 2H (gate, then up) if the activation has a gate, else H; out [E, C, H]; ends [E], int32. Without
    an order, x [slots, C] is sorted by expert, and so is the result. With order [N·k] and weights [N, k], x [N, C] are
    tokens, each of which visits k experts: order holds the slot (token · k + choice) of each sorted row, and the result
    [N, C] is Σ over a token's slots of weight · y.
    """
    if order is None or weights is None:
        return _sorted_ffn(x, up, out, ends, activation)
    slots = slots_of(order, ends, weights.shape[1])
    return combine(_sorted_ffn(dispatch(x, slots), up, out, ends, activation), weights, slots)


def _sorted_ffn(x: Tensor, up: Tensor, out: Tensor, ends: Tensor, activation: str) -> Tensor:
    y: Tensor = grouped_linear(expert_hidden(x, up, ends, activation), out, ends)
    return y


def expert_hidden(x: Tensor, up: Tensor, ends: Tensor, activation: str) -> Tensor:
    """act(W_up,e x_s) [slots, H] of sorted rows x [slots, C]: the input of the experts' last matrices."""
    parts = grouped_linear(x, up, ends).chunk(2 if activation in GATED else 1, -1)
    return ACTIVATIONS[activation](*parts)
