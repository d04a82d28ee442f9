"""Multi-Gate Residuals (arXiv 2605.23259) and the highway (arXiv 1505.00387)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.golden.arithmetic import EPS, rms, sigmoid, softmax, weighted_sum


def score(s: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    """w · RMS(s) / √C."""
    return (w * rms(s, eps)).sum() / math.sqrt(s.numel())


def gates(s: list[Tensor], w1: Tensor, b: Tensor, competitive: bool, eps: float = EPS) -> list[Tensor]:
    """β of each stream. Competitive biases are [b_0 (forget), b_1 … b_n], independent ones [b_1 … b_n]."""
    n = len(s)
    if competitive:
        powers = [torch.exp(score(s[i], w1, eps) + b[i + 1]) for i in range(n)]
        total = sum(powers) + torch.exp(b[0])
        return [p / total for p in powers]
    return [sigmoid(score(s[i], w1, eps) + b[i]) for i in range(n)]


def pool(s: list[Tensor], w2: Tensor, eps: float = EPS) -> Tensor:
    """h = Σ a_i s_i, a = softmax_i( w2 · RMS(s_i)/√C )."""
    return weighted_sum(softmax([score(s_i, w2, eps) for s_i in s]), s)


def write(s: list[Tensor], f: Tensor, w1: Tensor, b: Tensor, competitive: bool, eps: float = EPS) -> list[Tensor]:
    """s'_i = s_i + β_i (f − s_i)."""
    return [s_i + beta * (f - s_i) for s_i, beta in zip(s, gates(s, w1, b, competitive, eps), strict=True)]


def multi_gate_residuals(
    x: Tensor,
    y: list[Tensor],
    n: int,
    gate_queries: list[Tensor],
    biases: list[Tensor],
    pool_queries: list[Tensor],
    competitive: bool,
) -> list[Tensor]:
    """Fill: the first n − 1 outputs are appended as streams. Then every output is gated into all of them."""
    s = [x]
    h = [pool(s, torch.zeros_like(x))]
    for k, f in enumerate(y):
        if len(s) < n:
            s = [*s, f]
        else:
            lerp = k - (n - 1)
            s = write(s, f, gate_queries[lerp], biases[lerp], competitive)
        h.append(pool(s, pool_queries[k]))
    return h


def initial_bias(lerping: int, n: int) -> float:
    """b_init = ln( sqrt(L_lerp/21)·(e³+1) − n )."""
    return math.log(math.sqrt(lerping / 21) * (math.exp(3) + 1) - n)


def intended_beta(lerping: int) -> float:
    """β at the start: sqrt(21/L_lerp)·sigmoid(−3)."""
    return math.sqrt(21 / lerping) / (1 + math.exp(3))


def highway_scalar(x: Tensor, y: list[Tensor], w: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """h' = h + t (y − h), t = sigmoid( w · RMS(h)/√C + b ): one stream of independent gates."""
    h = [x]
    for k, output in enumerate(y):
        t = sigmoid(score(h[-1], w[k]) + b[k][0])
        h.append(h[-1] + t * (output - h[-1]))
    return h


def highway_elementwise(x: Tensor, y: list[Tensor], W: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    """h' = T ⊙ y + (1 − T) ⊙ h, T = sigmoid(W h + b)."""
    h = [x]
    for k, output in enumerate(y):
        T = sigmoid(W[k] @ h[-1] + b[k])
        h.append(T * output + (1 - T) * h[-1])
    return h
