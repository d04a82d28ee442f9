"""Norm placements and branch scales, LAuReL among them, as their papers write them, for one token and given outputs."""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from tests.golden.parts import rmsnorm


def scaled(x: Tensor, y: list[Tensor], scales: list[Tensor]) -> list[Tensor]:
    """x_{l+1} = x_l + diag(λ) f(x_l), or α f(x_l)."""
    h = [x]
    for scale, output in zip(scales, y, strict=True):
        h.append(h[-1] + scale * output)
    return h


def laurel(
    x: Tensor, y: list[Tensor], A: list[Tensor], B: list[Tensor], alpha: list[Tensor], beta: list[Tensor]
) -> list[Tensor]:
    """x_{i+1} = α f(x_i) + β (B A x_i + x_i)."""
    h = [x]
    for output, down, up, a, b in zip(y, A, B, alpha, beta, strict=True):
        h.append(a * output + b * (up @ (down @ h[-1]) + h[-1]))
    return h


def lns(x: Tensor, y: list[Tensor], gains: list[Tensor]) -> list[Tensor]:
    """h^(l) = LayerNorm(h^(l)) · 1/√l, l the layer from 1; the last norm as usual."""
    h, inputs = x, []
    for k, output in enumerate(y):
        layer = 1 + k // 2
        inputs.append(rmsnorm(h, gains[k]) / sqrt(layer))
        h = h + output
    return [*inputs, rmsnorm(h, gains[-1])]


def keel(x: Tensor, y: list[Tensor], gains: list[Tensor], alpha: float) -> list[Tensor]:
    """x_{l+1} = LN(α x_l + F(LN(x_l))); no α for the first attention and feed-forward, no outer LN for the former."""
    first, *others = y
    h = [x, x + first]
    for k, (gain, output) in enumerate(zip(gains, others, strict=True)):
        h.append(rmsnorm(h[-1] + output if k == 0 else alpha * h[-1] + output, gain))
    return h


def deepnorm(x: Tensor, y: list[Tensor], gains: list[Tensor], alpha: float) -> list[Tensor]:
    """x_{l+1} = LN(α x_l + G(x_l))."""
    h = [x]
    for gain, output in zip(gains, y, strict=True):
        h.append(rmsnorm(alpha * h[-1] + output, gain))
    return h


def resi_dual(x: Tensor, y: list[Tensor], gains: list[Tensor]) -> list[Tensor]:
    """x_post = LN(x_post + f), x_dual += f; out = x_post + LN(x_dual)."""
    post, dual, inputs = x, x, []
    for gain, output in zip(gains[:-1], y, strict=True):
        inputs.append(post)
        post, dual = rmsnorm(post + output, gain), dual + output
    return [*inputs, post + rmsnorm(dual, gains[-1])]
