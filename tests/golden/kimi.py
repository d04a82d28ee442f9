"""Kimi Linear (arXiv 2510.26692): its router and its two mixers, literally, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def route(weight: Tensor, bias: Tensor, x: Tensor, *, top_k: int, scale: float, normalize: bool) -> dict[int, Tensor]:
    """The experts of the token x [C] and their weights, by the scores σ(W x)."""
    scores = [1 / (1 + torch.exp(-(row * x).sum())) for row in weight]
    order = sorted(range(len(scores)), key=lambda e: float((scores[e] + bias[e]).detach()), reverse=True)
    chosen = order[:top_k]
    total = sum(scores[e] for e in chosen) if normalize else 1.0
    return {e: scale * scores[e] / total for e in chosen}
