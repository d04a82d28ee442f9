"""Residual scalars, x0 injection and backout, as nanochat's `gpt.py` and modded-nanogpt's `train_gpt.py` write them."""

from __future__ import annotations

from torch import Tensor

from tests.golden.arithmetic import rms


def nanochat(x: Tensor, y: list[Tensor], resid: Tensor, x0s: Tensor, backout: Tensor) -> list[Tensor]:
    """x = resid_lambdas[i] x + x0_lambdas[i] x0; x = block(x); cached after block n // 2; x − backout · cached."""
    layers = len(y) // 2
    x0 = h = rms(x)
    inputs = []
    for i in range(layers):
        h = resid[i] * h + x0s[i] * x0
        inputs.append(h)
        h = h + y[2 * i]
        inputs.append(h)
        h = h + y[2 * i + 1]
        if i == layers // 2:
            middle = h
    return [*inputs, h - backout * middle]


def modded(x: Tensor, y: list[Tensor], resid: Tensor, post: Tensor, x0s: Tensor, backout: Tensor) -> list[Tensor]:
    """x = resid_lambdas[k] x + post_lambdas[k] out + x0 gates[k], from the embedding as it is given."""
    h, inputs, states = x, [x], []
    for k, out in enumerate(y):
        h = resid[k] * h + post[k] * out + x * x0s[k]
        inputs.append(h)
        states.append(h)
    return [*inputs[:-1], h - backout * states[2 * (len(y) // 2 // 2) + 1]]
