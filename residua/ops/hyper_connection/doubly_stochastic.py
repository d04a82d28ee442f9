"""Sinkhorn's normalisation, fused: launching the kernels. Autograd keeps the logits alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from residua.ops._runtime.launch import on
from residua.ops.hyper_connection import sinkhorn_kernels as kernels

TILE = 1024  # elements of a tile


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The operator's contract is the reference's."""
    result: Tensor = _forward(logits.contiguous(), iterations)
    return result


@torch.library.custom_op("residua::sinkhorn", mutates_args=())
def _forward(logits: Tensor, iterations: int) -> Tensor:
    y = torch.empty_like(logits)
    tokens, sizes = _sizes(logits)
    if tokens:
        with on(logits):
            kernels.forward_kernel[(triton.cdiv(tokens, sizes["TOKENS"]),)](logits, y, tokens, iterations, **sizes)
    return y


@_forward.register_fake
def _(logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("residua::sinkhorn_backward", mutates_args=())
def _backward(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    g_logits = torch.empty_like(logits)
    tokens, sizes = _sizes(logits)
    scratch = logits.new_empty((iterations, tokens, 2 * sizes["N"]), dtype=torch.float32)
    if tokens:
        programs = (triton.cdiv(tokens, sizes["TOKENS"]),)
        with on(logits):
            kernels.backward_kernel[programs](g.contiguous(), logits, g_logits, scratch, tokens, iterations, **sizes)
    return g_logits


@_backward.register_fake
def _(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return _backward(g, *ctx.saved_tensors, ctx.iterations), None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(logits: Tensor) -> tuple[int, dict[str, int]]:
    n = logits.shape[-1]
    side = triton.next_power_of_2(n)
    return logits.shape[:-2].numel(), {"N": n, "SIDE": side, "TOKENS": max(1, TILE // side**2)}
