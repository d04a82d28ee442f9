"""A hyper-connection junction in plain PyTorch (HC, arXiv 2409.19606; mHC, 2512.24880; mHC-lite, 2601.05732)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from residua.ops._runtime.numeric import rms, wide

Norm = Literal["all", "each", "none"]
"""What is normalised and projected: all streams as one vector, each stream, or nothing."""


def hyper_step(
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    bias: Tensor,
    *,
    scale: Tensor | None = None,
    phi: Tensor | None = None,
    norm: Norm = "none",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a sublayer's output into the streams, weight the new streams, and read the next sublayer's input.

        X'_i = Σ_j mix_ij X_j + post_i y,     h = Σ_i pre_i X'_i
        all:  z = RMS(vec(X')) φᵀ,   pre_i = σ(scale · z_i + bias_i)          φ [K, N·C], z [..., K]
        each: z_i = RMS(X'_i) φᵀ,    pre_i = bias_i + scale · tanh(z_i0)      φ [K, C], z [..., N, K]
        none: pre_i = bias_i                                                  z [..., 0]

    streams X [..., N, C], update y [..., C]; post [..., N] and mix [..., N, N] (out, in), or the same for every token;
    bias [N], scale []. Returns h, X' and z, in float32 like the weights; part of z is for the caller's next write.
    """
    X = (mix @ wide(streams) + post[..., None] * wide(update)[..., None, :]).to(update.dtype)
    z = project(X, phi, norm, eps)
    pre = read_weights(z, bias, scale, norm)
    return (pre[..., None] * wide(X)).sum(-2).to(X.dtype), X, z


def single_pass_step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, pre: Tensor, phi: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper_step` with "each" and given read weights: nothing waits for z, which is for later weights.

        X'_i = Σ_j mix_ij X_j + post_i y,     h = Σ_i pre_i X'_i,     z_i = RMS(X'_i) φᵀ

    pre [..., N]. Returns h, X' and z [..., N, K].
    """
    X = (mix @ wide(streams) + post[..., None] * wide(update)[..., None, :]).to(update.dtype)
    return (pre[..., None] * wide(X)).sum(-2).to(X.dtype), X, project(X, phi, "each", eps)


def project(X: Tensor, phi: Tensor | None, norm: Norm, eps: float = 1e-6) -> Tensor:
    """z, from the streams."""
    x = wide(X)
    if norm == "none" or phi is None:
        return x.new_empty((*x.shape[:-2], 0))
    return rms(x.flatten(-2) if norm == "all" else x, eps) @ phi.to(x.dtype).T


def read_weights(z: Tensor, bias: Tensor, scale: Tensor | None, norm: Norm) -> Tensor:
    """pre [..., N], or [N] if it is the same for every token."""
    if norm == "none" or scale is None:
        return bias
    if norm == "all":
        return torch.sigmoid(scale * z[..., : bias.shape[-1]] + bias)
    return bias + scale * torch.tanh(z[..., 0])


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """exp(logits) [..., out, in] made doubly stochastic: normalise columns (over out), then rows (over in), repeatedly.

    Computed in logarithms, so that no row or column becomes zero.
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


def manifold_weights(
    logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """mHC's post = 2σ(scale_1 z + bias) [..., N] and mix = Sinkhorn(exp(scale_2 z + bias)) [..., N, N].

    logits z [..., 2N + N²] from `hyper_step`, whose first N belong to the read; scale [3], bias [2N + N²].
    """
    post, res = write_logits(logits, scale, bias, streams)
    return 2 * torch.sigmoid(post), sinkhorn(res, iterations)


def write_logits(logits: Tensor, scale: Tensor, bias: Tensor, streams: int) -> tuple[Tensor, Tensor]:
    """The logits of post [..., N] and mix [..., N, N]."""
    sizes = (streams, streams, streams * streams)
    _, post, res = (s * z + b for s, z, b in zip(scale, logits.split(sizes, -1), bias.split(sizes), strict=True))
    return post, res.unflatten(-1, (streams, streams))
