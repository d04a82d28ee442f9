"""Norms, feed-forwards, and the loss, one vector at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.golden.arithmetic import EPS, cap, rms, sigmoid, silu

GATES = {"sigmoid": sigmoid, "tanh": torch.tanh, "silu": silu, "identity": lambda z: z}


def rmsnorm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return weight * rms(x, eps)


def layernorm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x − E[x]) / sqrt(Var[x] + ε) · γ + β."""
    centred = x - x.sum() / len(x)
    y = centred / torch.sqrt((centred * centred).sum() / len(x) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def preaffine(x: Tensor, affine: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """RMSNorm(λ1 ⊙ x)."""
    return weight * rms(affine * x, eps)


def gate(y: Tensor, down: Tensor, up: Tensor, activation: str) -> Tensor:
    """y ⊙ σ(W_up · silu(W_down · y))."""
    return y * GATES[activation](up @ silu(down @ y))


def gatednorm(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, activation: str = "sigmoid", eps: float = EPS
) -> Tensor:
    return gate(rmsnorm(x, weight, eps), down, up, activation)


def dyt(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """γ tanh(αx) + β."""
    return weight * torch.tanh(alpha * x) + bias


def derf(x: Tensor, alpha: Tensor, shift: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weight * torch.special.erf(alpha * x + shift) + bias


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor) -> Tensor:
    return w_out @ (silu(w_gate @ x) * (w_up @ x))


def glu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor) -> Tensor:
    return w_out @ (sigmoid(w_gate @ x) * (w_up @ x))


def gelu_tanh(z: Tensor) -> Tensor:
    """gelu by its tanh approximation."""
    return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))


def geglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor) -> Tensor:
    return w_out @ (gelu_tanh(w_gate @ x) * (w_up @ x))


def clamped_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, w_out: Tensor) -> Tensor:
    """gpt-oss."""
    gate, up = w_gate @ x, w_up @ x
    gate = torch.where(gate > 7, torch.full_like(gate, 7), gate)
    up = torch.where(up > 7, torch.full_like(up, 7), torch.where(up < -7, torch.full_like(up, -7), up))
    return w_out @ ((up + 1) * gate * sigmoid(1.702 * gate))


def relu2(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    z = w_in @ x
    return w_out @ torch.where(z > 0, z * z, torch.zeros_like(z))


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """mean(lse − logit_target) and z_loss · mean(lse²) over the counted targets of hidden [N, C]."""
    losses, squares = [], []
    for h, target in zip(hidden, targets.tolist(), strict=True):
        if target == ignore_index:
            continue
        logits = weight @ h if softcap is None else cap(weight @ h, softcap)
        lse = torch.log(torch.exp(logits).sum())
        losses.append(lse - logits[target])
        squares.append(lse * lse)
    if not losses:
        return (hidden * 0).sum() + (weight * 0).sum(), (hidden * 0).sum()
    return sum(losses) / len(losses), z_loss * sum(squares) / len(squares)
