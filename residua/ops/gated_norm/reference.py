"""GatedNorm in plain PyTorch (arXiv 2601.22966)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from residua.ops._runtime.numeric import rms

GateActivation = Literal["sigmoid", "tanh", "silu", "identity"]


def gated_norm(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    eps: float = 1e-6,
    activation: GateActivation = "sigmoid",
) -> Tensor:
    """RMSNorm followed by a low-rank gate computed from its output.

        y = RMSNorm(x),   y' = y ⊙ σ(up · silu(down · y))

    x [..., C], weight [C], down [R, C], up [C, R] (or [1, R]: one gate for the whole vector). Returns [..., C].
    """
    return low_rank_gate(rms(x, eps, weight), down, up, activation=activation)


def low_rank_gate(y: Tensor, down: Tensor, up: Tensor, *, activation: GateActivation = "sigmoid") -> Tensor:
    """y ⊙ act(up · silu(down · y))."""
    return y * gate_scores(y, down, up, activation=activation)


def gate_scores(y: Tensor, down: Tensor, up: Tensor, *, activation: GateActivation = "sigmoid") -> Tensor:
    """act(up · silu(down · y)), [..., C], or [..., 1] if there is one gate for the whole vector."""
    return ACTIVATIONS[activation](linear(silu(linear(y, down.to(y.dtype))), up.to(y.dtype)))


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": silu,
    "identity": _identity,
}
