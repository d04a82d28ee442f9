"""Functions that every equation uses, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS = 1e-6


def rms(x: Tensor, eps: float = EPS) -> Tensor:
    """RMS(x) = x / sqrt(mean(x²) + eps), for one vector."""
    (width,) = x.shape
    mean_square = (x * x).sum() / width
    return x / torch.sqrt(mean_square + eps)


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def silu(z: Tensor) -> Tensor:
    return z * sigmoid(z)


def cap(z: Tensor, c: float) -> Tensor:
    """c · tanh(z / c)."""
    power = torch.exp(2 * z / c)
    return c * (power - 1) / (power + 1)


def gelu(z: Tensor) -> Tensor:
    return z * (1 + torch.erf(z / math.sqrt(2))) / 2


def softmax(logits: list[Tensor]) -> list[Tensor]:
    powers = [torch.exp(z) for z in logits]
    total = sum(powers)
    return [p / total for p in powers]


def weighted_sum(weights: list[Tensor], vectors: list[Tensor]) -> Tensor:
    total = torch.zeros_like(vectors[0])
    for a, v in zip(weights, vectors, strict=True):
        total = total + a * v
    return total
