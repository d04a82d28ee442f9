"""The weights with which mHC writes into streams: launching their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.launch import cdiv, on, power, sum_rows
from residua.ops.hyper_connection import kernels_weights as kernels

TOKENS = 32
"""Of a program: a warp, and one to a thread."""


def forward_outputs(
    logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """Room for what `forward` returns."""
    post = logits.new_empty((*logits.shape[:-1], streams), dtype=torch.float32)
    return post, post.new_empty((*post.shape, streams))


def forward(logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int) -> tuple[Tensor, Tensor]:
    """post [..., N] and mix [..., N, N]."""
    made = forward_outputs(logits, scale, bias, streams, iterations)
    tokens = logits.shape[:-1].numel()
    if tokens:
        with on(logits):
            kernels.forward_kernel[(cdiv(tokens, TOKENS),)](
                logits, scale, bias, *made, tokens, iterations, **_sizes(streams)
            )
    return made


def backward_outputs(
    g_post: Tensor | None, g_mix: Tensor | None, logits: Tensor, scale: Tensor, bias: Tensor, streams: int,
    iterations: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Room for what `backward` returns."""
    return torch.empty_like(logits), scale.new_empty(len(scale) + len(bias), dtype=torch.float32)


def backward(
    g_post: Tensor | None, g_mix: Tensor | None, logits: Tensor, scale: Tensor, bias: Tensor, streams: int,
    iterations: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of z, and of scale and bias in one row."""
    g_logits, total = backward_outputs(g_post, g_mix, logits, scale, bias, streams, iterations)
    tokens = logits.shape[:-1].numel()
    programs = cdiv(tokens, TOKENS)
    partial = total.new_empty((programs, len(total)))
    scratch = total.new_empty((iterations - 1, 2 * streams * tokens))
    with on(logits):
        if tokens:
            kernels.backward_kernel[(programs,)](
                logits if g_post is None else g_post.contiguous(), logits if g_mix is None else g_mix.contiguous(),
                logits, scale, bias, g_logits, partial, scratch, tokens, iterations,
                HAS_POST=g_post is not None, HAS_MIX=g_mix is not None, **_sizes(streams),
            )  # fmt: skip
        sum_rows(partial, total)
    return g_logits, total


def _sizes(n: int) -> dict[str, int]:
    return {"N": n, "SIDE": power(n), "K": n * (n + 2), "TOKENS": TOKENS, "num_warps": 1}
