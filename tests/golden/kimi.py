"""Kimi Linear (arXiv 2510.26692): its router and its two mixers, literally, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.golden.arithmetic import rms, sigmoid, silu, softmax, weighted_sum
from tests.golden.attention import rope

Groups = tuple[int, int, int]
"""Groups of experts, those that are chosen, and how many of a group's values are summed to compare it."""


def route(weight: Tensor, bias: Tensor, x: Tensor, **sizes: Any) -> dict[int, Tensor]:
    """The experts of the token x [C] and their weights, by the scores σ(W x)."""
    scores = [1 / (1 + torch.exp(-(row * x).sum())) for row in weight]
    return weigh(scores, [float((s + b).detach()) for s, b in zip(scores, bias, strict=True)], **sizes)


def weigh(
    scores: Sequence[Tensor],
    ranks: Sequence[float],
    *,
    top_k: int,
    scale: float,
    normalize: bool,
    groups: Groups | None = None,
) -> dict[int, Tensor]:
    """The experts with the largest ranks, those of the best groups if there are groups, and their weights."""
    members = [range(len(ranks))]
    if groups is not None:
        count, kept, best = groups
        size = len(ranks) // count
        every = [range(g * size, (g + 1) * size) for g in range(count)]
        members = sorted(every, key=lambda group: sum(sorted(ranks[e] for e in group)[-best:]), reverse=True)[:kept]
    order = sorted((e for group in members for e in group), key=lambda e: ranks[e], reverse=True)
    chosen = order[:top_k]
    total = sum(scores[e] for e in chosen) if normalize else 1.0
    return {e: scale * scores[e] / total for e in chosen}


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> Tensor:
    """S_t = (I − β k kᵀ) Diag(α) S_{t−1} + β k vᵀ, o_t = S_tᵀ q_t, for one head: q, k, g [T, K], v [T, V], beta [T]."""
    S = torch.zeros(k.shape[1], v.shape[1], dtype=v.dtype) if state is None else state
    outputs = []
    for t in range(v.shape[0]):
        turn = torch.eye(k.shape[1], dtype=v.dtype) - beta[t] * torch.outer(k[t], k[t])
        S = turn @ torch.diag(torch.exp(g[t])) @ S + beta[t] * torch.outer(k[t], v[t])
        outputs.append(S.T @ q[t])
    return torch.stack(outputs)


def kimi_delta_attention(
    x: Tensor, W: dict[str, Tensor], *, heads: int, eps: float, documents: list[int] | None = None
) -> Tensor:
    """Kimi Delta Attention of one sequence x [T, C]; W by the paper's names, `kernel` [taps, 3·H·D], newest first."""
    parts = [x @ W[name].T for name in ("q", "k", "v")]
    kernels = W["kernel"].chunk(3, 1)
    q, k, v = (short_convolution(y, kernel, documents) for y, kernel in zip(parts, kernels, strict=True))
    beta = sigmoid(x @ W["b"].T)
    fade = -torch.exp(W["A"]).repeat_interleave(q.shape[1] // heads) * softplus(
        x @ W["f_down"].T @ W["f_up"].T + W["dt"]
    )
    gate = sigmoid(x @ W["g_down"].T @ W["g_up"].T)
    per_head = []
    for h, (q_h, k_h, v_h, g_h, z_h) in enumerate(
        zip(*(y.chunk(heads, 1) for y in (q, k, v, fade, gate)), strict=True)
    ):
        unit_q, unit_k = (y / torch.sqrt((y * y).sum(1, keepdim=True) + 1e-6) for y in (q_h, k_h))
        o = torch.cat(
            [
                delta_rule(*(y[run] for y in (unit_q / math.sqrt(q_h.shape[1]), unit_k, v_h, g_h, beta[:, h])))
                for run in runs(documents, len(x))
            ]
        )
        per_head.append(torch.stack([W["gain"] * rms(row, eps) for row in o]) * z_h)
    return torch.cat(per_head, 1) @ W["out"].T


def short_convolution(y: Tensor, kernel: Tensor, documents: list[int] | None) -> Tensor:
    """silu(Σ_j kernel_j ⊙ y_{t−j}) over tokens of the same document."""
    rows = []
    for run in runs(documents, len(y)):
        own = y[run]
        for t in range(len(own)):
            rows.append(silu(sum(kernel[j] * own[t - j] for j in range(min(len(kernel), t + 1)))))
    return torch.stack(rows)


def runs(documents: list[int] | None, length: int) -> list[slice]:
    """The tokens of each document in turn."""
    starts = [t for t in range(length) if t == 0 or (documents is not None and documents[t] != documents[t - 1])]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]


def latent_attention(
    x: Tensor,
    W: dict[str, Tensor],
    *,
    heads: int,
    head_dim: int,
    shared_dim: int,
    theta: float | None,
    documents: list[int] | None = None,
) -> Tensor:
    """Multi-head latent attention of one sequence x [T, C], keys and values made for every head; `u` is W_uk over W_uv
    head by head."""
    given = x if "q_down" not in W else torch.stack([W["q_gain"] * rms(row) for row in x @ W["q_down"].T])
    queries, c, s = given @ W["q"].T, torch.stack([W["gain"] * rms(W["c"] @ row) for row in x]), x @ W["s"].T
    length, per_head = len(x), []
    for q, u in zip(queries.chunk(heads, 1), W["u"].chunk(heads), strict=True):
        W_uk, W_uv = u[:head_dim], u[head_dim:]
        outputs = []
        for t in range(length):
            earlier = [j for j in range(t + 1) if documents is None or documents[j] == documents[t]]
            own, turned = q[t, :head_dim], _turned(q[t, head_dim:], t, theta)
            scale = 1 / math.sqrt(head_dim + shared_dim)
            logits = [((own * (W_uk @ c[j])).sum() + (turned * _turned(s[j], j, theta)).sum()) * scale for j in earlier]
            outputs.append(weighted_sum(softmax(logits), [W_uv @ c[j] for j in earlier]))
        per_head.append(torch.stack(outputs))
    return torch.cat(per_head, 1) @ W["out"].T


def _turned(v: Tensor, position: int, theta: float | None) -> Tensor:
    return v if theta is None else rope(v, position, theta)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x)."""
    return torch.log(1 + torch.exp(x))
