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


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_t = (I − β k kᵀ) Diag(α) S_{t−1} + β k vᵀ, o_t = S_tᵀ q_t, for one head: q, k, g [T, K], v [T, V], beta [T]."""
    S = torch.zeros(k.shape[1], v.shape[1], dtype=v.dtype)
    outputs = []
    for t in range(v.shape[0]):
        turn = torch.eye(k.shape[1], dtype=v.dtype) - beta[t] * torch.outer(k[t], k[t])
        S = turn @ torch.diag(torch.exp(g[t])) @ S + beta[t] * torch.outer(k[t], v[t])
        outputs.append(S.T @ q[t])
    return torch.stack(outputs)
