"""The residual sum, the clipped one, and DenseFormer (arXiv 2402.02622)."""

from __future__ import annotations

import torch
from torch import Tensor


def additive(x: Tensor, y: list[Tensor]) -> list[Tensor]:
    """h_{k+1} = h_k + y_k."""
    h = [x]
    for output in y:
        h.append(h[-1] + output)
    return h


def parallel(x: Tensor, y: list[Tensor]) -> list[Tensor]:
    """x + A(x) + F(x) layer by layer, both sublayers reading x."""
    h = [x]
    for attention, feed_forward in zip(y[::2], y[1::2], strict=True):
        h += [h[-1], h[-1] + attention + feed_forward]
    return h


def layer_factor(x: Tensor, y: list[Tensor], s: Tensor) -> list[Tensor]:
    """s_l · (x + A(x) + F(x + A(x))) layer by layer."""
    h = [x]
    for layer in range(len(y) // 2):
        after_attention = h[-1] + y[2 * layer]
        h += [after_attention, s[layer] * (after_attention + y[2 * layer + 1])]
    return h


def clipped(x: Tensor, y: list[Tensor], c: float) -> list[Tensor]:
    """The residual stream, cut at ±c."""
    h = [x]
    for output in y:
        total = h[-1] + output
        h.append(torch.where(total > c, torch.full_like(total, c), torch.where(total < -c, -c, total)))
    return h


def denseformer(x: Tensor, y: list[Tensor], alpha: dict[int, Tensor], dilation: int, period: int) -> list[Tensor]:
    """Y_i = Σ_{j ≤ i, j ≡ i mod k} α_ij X_j if p | i, else X_i; X_{i+1} = B_{i+1}(Y_i). α[i] lists its j ascending."""
    X = [x]
    Y = x
    h = [x]
    for i in range(1, len(y) // 2 + 1):
        after_attention = Y + y[2 * i - 2]
        X.append(after_attention + y[2 * i - 1])
        if i % period == 0:
            taken = [j for j in range(i + 1) if j % dilation == i % dilation]
            assert len(taken) == len(alpha[i])
            Y = sum(alpha[i][m] * X[j] for m, j in enumerate(taken))
        else:
            Y = X[i]
        h += [after_attention, Y]
    return h
