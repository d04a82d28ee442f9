"""Hyper-connections and Sinkhorn's normalisation: tile sizes, and launching the kernels.

A step's forward pass reads X and y and writes X' and h, (2N + 2)C numbers per token. Its backward pass reads the
gradients of X' and h, X and y, and writes the gradients of X and y, (3N + 3)C; then it reads X' once more for φ's
gradient, a matrix product over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import cdiv, on, power
from residua.ops.hyper_connection import kernels, kernels_sinkhorn

# Tokens of a tile, channels of a block (half as many for more than 4 streams), warps: forward and backward.
FORWARD, BACKWARD = (32, 64, 4), (16, 64, 4)
SINKHORN_TILE = 1024
"""Elements of a tile of matrices."""


def step_outputs(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    logits, rstd = (
        streams.new_empty((streams.shape[0], _numbers(streams, phi, norm)), dtype=torch.float32) for _ in "zr"
    )
    weights = streams.new_empty(streams.shape[:2], dtype=torch.float32)
    return torch.empty_like(streams), torch.empty_like(update), logits, rstd, weights


def step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, bias: Tensor, scale: Tensor, phi: Tensor, norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """X' [M, N, C], h [M, C], z and the rstd of each of its numbers [M, Z], and pre [M, N]."""
    made = step_outputs(streams, update, post, mix, bias, scale, phi, norm, eps)
    post, mix = _dense(post), _dense(mix)
    rounded = phi.to(streams.dtype)
    split = norm != "none" and rounded.dtype != phi.dtype
    rest = (phi - rounded).to(streams.dtype) if split else rounded
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *FORWARD)
    if tokens:
        with on(streams):
            kernels.forward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](
                streams, update, post, mix, scale, bias, rounded, rest, *made,
                tokens, post.stride(0), mix.stride(0), eps, SPLIT=split, **sizes,
            )  # fmt: skip
    return made


def step_gradients(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, n, _ = streams.shape
    g_post, g_mix, g_pre = (streams.new_empty((tokens, size), dtype=torch.float32) for size in (n, n * n, n))
    return torch.empty_like(streams), torch.empty_like(update), g_post, g_mix, g_pre, torch.empty_like(logits)


def step_backward(
    g_hidden: Tensor, g_after: Tensor | None, g_logits: Tensor | None, streams: Tensor, update: Tensor, post: Tensor,
    mix: Tensor, scale: Tensor, phi: Tensor, logits: Tensor, rstd: Tensor, weights: Tensor, norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of X and y; of post, mix and what makes pre, per token; and rstd · dz."""
    made = step_gradients(
        g_hidden, g_after, g_logits, streams, update, post, mix, scale, phi, logits, rstd, weights, norm
    )
    post, mix = _dense(post), _dense(mix)
    phi = phi.to(streams.dtype)
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *BACKWARD)
    if tokens:
        with on(streams):
            kernels.backward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](
                g_hidden if g_after is None else g_after.contiguous(), g_hidden.contiguous(),
                g_hidden if g_logits is None else g_logits.contiguous(),
                streams, update, post, mix, scale, phi, logits, rstd, weights, *made,
                tokens, post.stride(0), mix.stride(0), HAS_AFTER=g_after is not None, HAS_LOGITS=g_logits is not None,
                SQUARE=power(streams.shape[1] * (streams.shape[1] + 1)),
                **sizes,
            )  # fmt: skip
    return made


def sinkhorn_output(logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    y = sinkhorn_output(logits, iterations)
    tokens, sizes = _sinkhorn_sizes(logits)
    if tokens:
        with on(logits):
            kernels_sinkhorn.forward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](logits, y, tokens, iterations, **sizes)
    return y


def sinkhorn_gradient(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


def sinkhorn_backward(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    g_logits = sinkhorn_gradient(g, logits, iterations)
    tokens, sizes = _sinkhorn_sizes(logits)
    scratch = logits.new_empty((iterations, tokens, 2 * sizes["N"]), dtype=torch.float32)
    if tokens:
        programs = (cdiv(tokens, sizes["TOKENS"]),)
        with on(logits):
            kernels_sinkhorn.backward_kernel[programs](
                g.contiguous(), logits, g_logits, scratch, tokens, iterations, **sizes
            )
    return g_logits


def _numbers(streams: Tensor, phi: Tensor, norm: str) -> int:
    """How many numbers z has for a token."""
    return len(phi) * {"all": 1, "each": streams.shape[1], "none": 0}[norm]


def _dense(x: Tensor) -> Tensor:
    """Numbers of one token side by side; tokens may share them (stride 0)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(streams: Tensor, phi: Tensor, norm: str, tokens: int, block: int, warps: int) -> dict[str, Any]:
    _, n, width = streams.shape
    numbers = _numbers(streams, phi, norm)
    return {
        "C": width,
        "N": n,
        "K": len(phi),
        "Z": numbers,
        "RANK": max(16, power(numbers)),
        "TOKENS": tokens,
        "BLOCK": block if n <= 4 else block // 2,
        "NORM": norm,
        "num_warps": warps,
        "num_stages": 1,
    }


def _sinkhorn_sizes(logits: Tensor) -> tuple[int, dict[str, int]]:
    n = logits.shape[-1]
    side = power(n)
    return logits.shape[:-2].numel(), {"N": n, "SIDE": side, "TOKENS": max(1, SINKHORN_TILE // side**2)}
