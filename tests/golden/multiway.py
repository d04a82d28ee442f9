"""MUDD (arXiv 2502.12170), DeepCrossAttention (arXiv 2502.06785), Parcae's injection (arXiv 2604.12946), for one token.

Reads are listed as q, k, v, r.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.golden.arithmetic import gelu, rms


class Aggregate(NamedTuple):
    """The weights of one layer's reads: W1 [R, C], W2 [R, R], a [ways, sources]."""

    W1: Tensor
    W2: Tensor
    a: Tensor


def mudd(
    x: Tensor, y: list[Tensor], ways: tuple[str, ...], aggregates: dict[int, Aggregate], sources: int | None
) -> list[Tensor]:
    """X_{i+1} = B_i(X̄_q, X̄_k, X̄_v, X̄_r), X̄_c = Σ_j (A_c[j] + a_c[j]) X_j with A of X_i alone."""
    X, h, r = [x], [x], x
    layers = len(y) // 2
    for i in range(1, layers + 1):
        after_attention = r + y[2 * i - 2]
        X.append(after_attention + y[2 * i - 1])
        h.append(after_attention)
        if i not in aggregates:
            r = X[i]
            h.append(r)
            continue
        W1, W2, a = aggregates[i]
        seen = X if sources is None else [X[0], *X[1:][-sources:]]
        A = W2 @ gelu(W1 @ rms(X[i]))
        mixed = [sum((A[c * len(seen) + j] + a[c][j]) * seen[j] for j in range(len(seen))) for c in range(len(a))]
        read = dict(zip(ways if i < layers else ("r",), mixed, strict=True))
        r = read.get("r", X[i])
        h += [r] if [*read] == ["r"] else [read.get(way, X[i]) for way in "qkvr"]
    return h


class Choice(NamedTuple):
    """One way's weights: w [C], b [sources, C]."""

    w: Tensor
    b: Tensor


def deep_cross(x: Tensor, y: list[Tensor], choices: list[list[Choice]], recent: int | None) -> list[Tensor]:
    """X_i is what layer i adds; X̄_c = Σ_j X_j ⊙ relu(b_cj + w_c · N(X_j)); the feed-forward reads X̄_q + attention."""
    X, h = [x], []
    for i in range(len(y) // 2 + 1):
        seen = X
        if recent is not None and len(X) - 1 > recent:
            seen = [X[0], sum(X[1 : len(X) - recent]), *X[len(X) - recent :]]
        reads = []
        for w, b in choices[i]:
            parts = []
            for j, source in enumerate(seen):
                weight = b[j] + (w * rms(source)).sum()
                parts.append(source * torch.where(weight > 0, weight, torch.zeros_like(weight)))
            reads.append(sum(parts))
        if len(reads) == 1:
            return [*h, reads[0]]
        q, k, v = reads
        h += [q, k, v, q, q + y[2 * i]]
        X.append(y[2 * i] + y[2 * i + 1])
    raise AssertionError("the last read has one way")


def injection(x: Tensor, y: list[Tensor], a: Tensor, d: Tensor, b: Tensor, starts: list[int]) -> list[Tensor]:
    """h_0 = e = N(prelude); a turn begins from exp(−Δ exp(a)) h + Δ b e, Δ = exp(d), and adds its layers' outputs."""
    h, inputs, e = x, [], None
    for k in range(len(y) + 1):
        if k in starts:
            if e is None:
                e = h = rms(h)
            delta = torch.exp(d)
            h = torch.exp(-delta * torch.exp(a)) * h + delta * b * e
        inputs.append(h)
        if k < len(y):
            h = h + y[k]
    return inputs
