"""Causal softmax attention and projection mixing, one sequence, head and query at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.golden.arithmetic import EPS, cap, gelu, rms, sigmoid, softmax, weighted_sum

Projections = dict[str, Tensor]
"""Pathway name to [T, heads, head_dim] ([T, heads, 1] for a headwise gate)."""


def project(x: Tensor, W: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """S[t, h] = the h-th slice of W x_t + b; x [T, C]."""
    S = torch.stack([torch.stack([W_h @ x_t for W_h in W.chunk(heads)]) for x_t in x])
    return S if bias is None else S + torch.stack(bias.chunk(heads))


def rotary(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position · theta^(−2i/D) in float64; the product's own are in float32, by design."""
    i = torch.arange(width // 2, dtype=torch.float64)
    angles = positions.double()[:, None] * theta ** (-2 * i / width)
    return angles.cos(), angles.sin()


def rope(v: Tensor, position: int, theta: float) -> Tensor:
    """Turn the pairs (v_i, v_{i+D/2}) by position · theta^(−2i/D)."""
    half = v.numel() // 2
    i = torch.arange(half, dtype=v.dtype)
    angle = position * theta ** (-2 * i / v.numel())
    first, second = v[:half], v[half:]
    return torch.cat(
        [
            first * torch.cos(angle) - second * torch.sin(angle),
            second * torch.cos(angle) + first * torch.sin(angle),
        ]
    )


def attention(
    S: Projections,
    W_out: Tensor,
    *,
    theta: float,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    sink: Tensor | None = None,
    documents: list[int] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    growth: tuple[float, int] | None = None,
    eps: float = EPS,
    b_out: Tensor | None = None,
    removes_own: bool = False,
) -> Tensor:
    """QK-norm, RoPE, softmax over earlier positions of the same document (and the sink), gate, output projection.

    A gain longer than a head stands for a norm over all heads together. A query sees `window` positions, itself one.
    """
    length, heads, head_dim = S["q"].shape
    group = heads // S["k"].shape[1]
    queries = [[rope(v, t, theta) for v in _normed(S["q"][t], q_gain, eps)] for t in range(length)]
    keys = [[rope(v, t, theta) for v in _normed(S["k"][t], k_gain, eps)] for t in range(length)]
    rows = []
    for t in range(length):
        earlier = [j for j in range(t + 1) if documents is None or documents[j] == documents[t]]
        place = len(earlier) - 1
        earlier = [j for j in earlier if window is None or t - j < window]
        per_head = []
        for h in range(heads):
            if growth is not None:
                beta, context = growth
                queries[t][h] = queries[t][h] * (1 + beta * math.log(1 + place // context))
            logits = [(queries[t][h] * keys[j][h // group]).sum() / math.sqrt(head_dim) for j in earlier]
            if softcap is not None:
                logits = [cap(score, softcap) for score in logits]
            weights = softmax(logits if sink is None else [*logits, sink[h]])[: len(earlier)]
            y = weighted_sum(weights, [S["v"][j, h // group] for j in earlier])
            if removes_own:  # XSA
                v = S["v"][t, h // group]
                y = y - (y * v).sum() / (v * v).sum() * v
            per_head.append(y * sigmoid(S["g"][t, h]) if "g" in S else y)
        rows.append(W_out @ torch.cat(per_head))
    return torch.stack(rows) if b_out is None else torch.stack(rows) + b_out


def _normed(heads: Tensor, gain: Tensor | None, eps: float) -> list[Tensor]:
    """The heads [H, D] of one position, normed each by itself, or together if the gain is that long."""
    if gain is not None and gain.numel() > heads.shape[1]:
        return list((gain * rms(heads.flatten(), eps)).chunk(len(heads)))
    return [v if gain is None else gain * rms(v, eps) for v in heads]


def normed(S: Tensor, gain: Tensor | None, eps: float = EPS) -> Tensor:
    """N(S_anc): RMS over head_dim with gain, each token and head; the identity without one."""
    if gain is None:
        return S
    return torch.stack([torch.stack([gain * rms(v, eps) for v in heads]) for heads in S])


def mix(S: Tensor, anchor: Tensor, l1: list[Tensor], l2: list[Tensor]) -> Tensor:
    """Ŝ[t, h] = λ1 ⊙ S_anc[t, h] + λ2 ⊙ S[t, h]; `l1`, `l2` list a token's λ, each [H, D], [H, 1], [H] or a number."""

    def of_head(scale: Tensor, h: int) -> Tensor:
        return scale if scale.dim() == 0 else scale[h]

    return torch.stack(
        [
            torch.stack([of_head(l1[t], h) * anchor[t, h] + of_head(l2[t], h) * S[t, h] for h in range(S.shape[1])])
            for t in range(S.shape[0])
        ]
    )


def gamma(x: Tensor, W1: Tensor, W2: Tensor, b: Tensor) -> Tensor:
    """γ = σ(GELU(x W1) W2 + b) of one token; weights here are stored [out, in]."""
    return sigmoid(W2 @ gelu(W1 @ x) + b)


def mixed(
    x: Tensor,
    own: Projections,
    anchors: Projections,
    lambda1: Projections,
    lambda2: Projections,
    dynamic: tuple[Tensor, Tensor, Tensor] | None,
) -> Projections:
    """Every pathway of `anchors` mixed into the layer's own; with `dynamic` (W1, W2, b), λ is multiplied by γ(x_t).

    γ comes in the order of the pathways, anchor's before current's: q1, q2, k1, k2, …
    """
    result = dict(own)
    ones = [1.0] * (2 * len(anchors))
    factors = [ones if dynamic is None else gamma(x_t, *dynamic) for x_t in x]
    for i, s in enumerate(anchors):
        l1 = [lambda1[s] * g[2 * i] for g in factors]
        l2 = [lambda2[s] * g[2 * i + 1] for g in factors]
        result[s] = mix(own[s], anchors[s], l1, l2)
    return result


def gate_values(x: Tensor, V: Tensor, V1: Tensor, W: Tensor, gate: str) -> Tensor:
    """V̂[t, h] = V[t, h] + α_h V1[t, h], α = gate(W x_t) (SATFormer); softmax is over heads, times their number."""
    rows = []
    for t in range(len(x)):
        z = [W_h @ x[t] for W_h in W]
        alpha = {
            "relu": lambda z=z: [torch.clamp(z_h, min=0) for z_h in z],
            "sigmoid": lambda z=z: [sigmoid(z_h) for z_h in z],
            "tanh": lambda z=z: [(torch.exp(2 * z_h) - 1) / (torch.exp(2 * z_h) + 1) for z_h in z],
            "softmax": lambda z=z: [len(z) * a for a in softmax(z)],
        }[gate]()
        rows.append(torch.stack([V[t, h] + alpha[h] * V1[t, h] for h in range(len(z))]))
    return torch.stack(rows)


def route_heads(S: list[Tensor], R: Tensor) -> Tensor:
    """Ŝ[t, g] = Σ_{l', g'} R[g, (l', g')] S_{l'}[t, g']: LIMe; S has the keys, or the values, of all layers so far."""
    heads = len(R)
    rows = []
    for t in range(len(S[0])):
        every = [S_l[t, h] for S_l in S for h in range(heads)]
        rows.append(torch.stack([sum(R[g, i] * s for i, s in enumerate(every)) for g in range(heads)]))
    return torch.stack(rows)


def attend_layers(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """V̂[t, h] = Σ_l a_l V_l[t, h], a = softmax_l(q̄·k_l[t, h]/√d): Depth-Attention, q̄ the mean query of a group."""
    heads, d = keys[0].shape[1:]
    shared = q.shape[1] // heads
    rows = []
    for t in range(len(q)):
        row = []
        for h in range(heads):
            mean = sum(q[t, h * shared + i] for i in range(shared)) / shared
            a = softmax([(mean * k[t, h]).sum() / math.sqrt(d) for k in keys])
            row.append(sum(a_l * v[t, h] for a_l, v in zip(a, values, strict=True)))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def embed_values(x: Tensor, V: Tensor, tokens: Tensor, E: Tensor, W: Tensor, scale: float) -> Tensor:
    """V̂[t, h] = V[t, h] + scale·σ(W_h · x_t[:c]) E[token_t, h]: value embeddings (nanochat); E [V, H·D], W [H, c]."""
    heads, channels = W.shape
    rows = []
    for t in range(len(x)):
        vectors = E[int(tokens[t])].chunk(heads)
        gates = [scale * sigmoid((W[h] * x[t, :channels]).sum()) for h in range(heads)]
        rows.append(torch.stack([V[t, h] + gates[h] * vectors[h] for h in range(heads)]))
    return torch.stack(rows)
