"""Sinkhorn's normalisation: launching its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.launch import cdiv, on, power
from residua.ops.hyper_connection import kernels_sinkhorn as kernels

TILE = 1024
"""Elements of a tile of matrices."""


def forward_output(logits: Tensor, iterations: int) -> Tensor:
    """Room for what `forward` returns."""
    return torch.empty_like(logits)


def forward(logits: Tensor, iterations: int) -> Tensor:
    """Doubly stochastic matrices [..., N, N] of the logits."""
    y = forward_output(logits, iterations)
    tokens, sizes = _sizes(logits)
    if tokens:
        with on(logits):
            kernels.forward_kernel[(cdiv(tokens, sizes["TOKENS"]),)](logits, y, tokens, iterations, **sizes)
    return y


def backward_output(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    """Room for what `backward` returns."""
    return torch.empty_like(logits)


def backward(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    """The gradient of the logits."""
    g_logits = backward_output(g, logits, iterations)
    tokens, sizes = _sizes(logits)
    scratch = logits.new_empty((iterations, tokens, 2 * sizes["N"]), dtype=torch.float32)
    if tokens:
        programs = (cdiv(tokens, sizes["TOKENS"]),)
        with on(logits):
            kernels.backward_kernel[programs](g.contiguous(), logits, g_logits, scratch, tokens, iterations, **sizes)
    return g_logits


def _sizes(logits: Tensor) -> tuple[int, dict[str, int]]:
    n = logits.shape[-1]
    side = power(n)
    return logits.shape[:-2].numel(), {"N": n, "SIDE": side, "TOKENS": max(1, TILE // side**2)}
