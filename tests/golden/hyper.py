"""Hyper-connections: HC (arXiv 2409.19606), mHC (2512.24880), mHC-lite (2601.05732)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from tests.golden.arithmetic import rms, sigmoid, softmax


@dataclass
class HyperJunction:
    """HC: A_m [n], B [n] and A_r [in, out], static; with W and s also dynamic. s_a serves A_m and A_r, s_b B."""

    A_m: Tensor
    B: Tensor
    A_r: Tensor
    W_m: Tensor | None = None
    W_b: Tensor | None = None
    W_r: Tensor | None = None
    s_a: Tensor | None = None
    s_b: Tensor | None = None

    def weights(self, H: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
        n = len(H)
        if self.W_m is None:
            return [*self.A_m], [*self.B], [[self.A_r[i, j] for j in range(n)] for i in range(n)]
        normed = [rms(s) for s in H]
        A_m = [self.A_m[i] + self.s_a * torch.tanh(normed[i] @ self.W_m) for i in range(n)]
        B = [self.B[i] + self.s_b * torch.tanh(normed[i] @ self.W_b) for i in range(n)]
        if self.W_r is None:
            return A_m, B, [[self.A_r[i, j] for j in range(n)] for i in range(n)]
        A_r = [[self.A_r[i, j] + self.s_a * torch.tanh(normed[i] @ self.W_r[:, j]) for j in range(n)] for i in range(n)]
        return A_m, B, A_r

    def read(self, H: list[Tensor]) -> Tensor:
        """h = A_mᵀ H."""
        A_m, _, _ = self.weights(H)
        return sum(A_m[i] * H[i] for i in range(len(H)))

    def write(self, H: list[Tensor], y: Tensor) -> list[Tensor]:
        """H' = B y + A_rᵀ H."""
        _, B, A_r = self.weights(H)
        n = len(H)
        return [B[j] * y + sum(A_r[i][j] * H[i] for i in range(n)) for j in range(n)]


def shifts(c: Tensor) -> Tensor:
    """Σ_j softmax(c)_j Shift^j as A_r [in, out]; Shift moves stream i to i + 1."""
    n = len(c)
    shift = torch.zeros(n, n, dtype=c.dtype)
    for i in range(n):
        shift[i, (i + 1) % n] = 1.0
    return sum(a * torch.linalg.matrix_power(shift, j) for j, a in enumerate(softmax([*c])))


def single_pass(x: Tensor, y: list[Tensor], n: int, junctions: list[HyperJunction]) -> list[Tensor]:
    """Sublayer k+1 reads the new streams with the weights that its A_m has for the streams before the write."""
    H = [x] * n
    h = [junctions[0].read(H)]
    for k, output in enumerate(y):
        A_m = junctions[k + 1].weights(H)[0] if k + 1 < len(y) else [1.0] * n
        H = junctions[k].write(H, output)
        h.append(sum(A_m[i] * H[i] for i in range(n)))
    return h


class FracJunction(NamedTuple):
    """B [m], Y and A [m, m] as the paper has them, [in, out]; with dynamic weights W_β, W_γ, W_α and their scales."""

    B: Tensor
    Y: Tensor
    A: Tensor
    W_beta: Tensor | None = None
    W_gamma: Tensor | None = None
    W_alpha: Tensor | None = None
    s_alpha: Tensor | None = None
    s_beta: Tensor | None = None


def frac(x: Tensor, y: list[Tensor], m: int, junctions: list[FracJunction]) -> list[Tensor]:
    """h_0 = Reshape(Yᵀ H, d); H ← B ∘ Reshape(T(h_0), (m, d/m)) + Aᵀ H; at the end Reshape(H, d)."""
    H, inputs = x.reshape(m, -1), []
    for output, junction in zip(y, junctions, strict=True):
        B, Y, A = junction.B, junction.Y, junction.A
        if junction.W_beta is not None:
            N = torch.stack([rms(row) for row in H])
            B = junction.s_beta * torch.tanh(N @ junction.W_beta) + B
            Y = junction.s_alpha * torch.tanh(N @ junction.W_gamma) + Y
            A = junction.s_alpha * torch.tanh(N @ junction.W_alpha) + A
        inputs.append((Y.T @ H).reshape(-1))
        H = torch.diag(B) @ output.reshape(m, -1) + A.T @ H
    return [*inputs, H.reshape(-1)]


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """exp, then columns (each sums to one over `out`), then rows (over `in`), and again."""
    n = logits.shape[0]
    M = torch.exp(logits)
    for _ in range(iterations):
        M = torch.stack([M[:, j] / sum(M[i, j] for i in range(n)) for j in range(n)], dim=1)
        M = torch.stack([M[i, :] / sum(M[i, j] for j in range(n)) for i in range(n)], dim=0)
    return M


def permutation_mixture(logits: Tensor, n: int) -> Tensor:
    """Σ_k softmax(logits)_k P_k; permutations in lexicographic order, P_k[out, in] = 1 where in = p(out)."""
    weights = softmax([*logits])
    H = torch.zeros(n, n, dtype=logits.dtype)
    for a, p in zip(weights, permutations(range(n)), strict=True):
        P = torch.zeros(n, n, dtype=logits.dtype)
        for out, source in enumerate(p):
            P[out, source] = 1.0
        H = H + a * P
    return H


@dataclass
class ManifoldJunction:
    """[pre, post, res] = α · (vec(X) φ)/rms(vec(X)) + b, φ [nC, n + n + R]; `mixing` turns res into H_res[out, in]."""

    phi: Tensor
    alpha: Tensor
    b: Tensor
    mixing: Callable[[Tensor], Tensor]

    def weights(self, X: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        n = len(X)
        vec = torch.cat(X)
        root_mean_square = torch.sqrt((vec * vec).sum() / vec.numel() + 1e-6)
        projected = (vec @ self.phi) / root_mean_square
        pre = self.alpha[0] * projected[:n] + self.b[:n]
        post = self.alpha[1] * projected[n : 2 * n] + self.b[n : 2 * n]
        res = self.alpha[2] * projected[2 * n :] + self.b[2 * n :]
        return sigmoid(pre), 2 * sigmoid(post), self.mixing(res)

    def read(self, X: list[Tensor]) -> Tensor:
        """H_pre X."""
        pre, _, _ = self.weights(X)
        return sum(pre[i] * X[i] for i in range(len(X)))

    def write(self, X: list[Tensor], y: Tensor) -> list[Tensor]:
        """X' = H_res X + H_postᵀ y."""
        _, post, H_res = self.weights(X)
        n = len(X)
        return [sum(H_res[out, i] * X[i] for i in range(n)) + post[out] * y for out in range(n)]


Junction = HyperJunction | ManifoldJunction


def streams(x: Tensor, y: list[Tensor], n: int, junctions: list[Junction]) -> list[Tensor]:
    """Entry: n copies of the embedding. Exit: the sum of the streams."""
    X = [x for _ in range(n)]
    h = []
    for junction, output in zip(junctions, y, strict=True):
        h.append(junction.read(X))
        X = junction.write(X, output)
    h.append(sum(X))
    return h
