"""Small pieces of arithmetic that several reference operators share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from residua.ops._runtime.tracing import differentiable

F = TypeVar("F", bound=Callable[..., Any])

ALIGNED = 8
"""Numbers of two bytes in 16 bytes, where rows of a matrix product should begin."""


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result` without the import of `torch._dynamo`, which takes seconds.

    Tracing calls the function and records its result as a constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def wide(x: Tensor) -> Tensor:
    """x in at least float32, because half-precision tensors are reduced in single precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms(x: Tensor, eps: float = 1e-6, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, times the gain if there is one; in x's own dtype."""
    w = wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def mix_slices(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_j w_ij x_j [..., i, C] of few slices x [..., j, C], in at least float32; w is [..., i, j] or [i, j].

    In compiled code, a matrix library is slow for matrices this small and needs copies of the operands. As sums they
    fuse with the surrounding kernels. The gradient of w is summed over channels first, then over tokens, so x is read
    once, not once per weight. x is widened inside the product: a copy shared by several sums would be written to
    memory.
    """
    if not torch.compiler.is_compiling():
        return weights @ wide(x)
    each = weights.expand(*x.shape[:-2], -1, -1)
    return (each[..., None] * x[..., None, :, :]).sum(-2)


def few_products(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x Wᵀ [..., K] for a W [K, C] with few rows; in compiled code as sums, with one kernel per `rows` rows."""
    if not torch.compiler.is_compiling():
        return linear(wide(x), weight)
    return _few_products(x, weight, rows)


def _few_products_backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    g, few = g.flatten(0, -2).to(x.dtype), len(weight)
    zeros = -few % ALIGNED
    g = torch.cat([g, g.new_zeros(len(g), zeros)], 1)
    shares = math.gcd(len(g), 64)
    parts = torch.bmm(g.unflatten(0, (shares, -1)).mT, x.reshape(shares, -1, x.shape[-1]))
    g_x = g @ torch.cat([weight, weight.new_zeros(zeros, weight.shape[1])]).to(x.dtype)
    return g_x.view_as(x), wide(parts).sum(0)[:few]


@differentiable(_few_products_backward)
def _few_products(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """Sums forward, matrix products backward, whose operands are rounded to x's dtype like those of a linear map.

    As a sum over tokens, inductor would compute W's gradient with strided reads of x, one channel of all tokens after
    another. The tokens are divided into shares, since one product with few rows would leave most of a GPU idle.
    """
    ctx.save_for_backward(x, weight)
    return torch.cat([(wide(x)[..., None, :] * part).sum(-1) for part in weight.split(rows)], -1)


def stored(x: Tensor) -> Tensor:
    """x; compiled code computes it once and writes it to memory, instead of computing it again in every kernel.

    For numbers per token that weight channels: computed again, a tanh is taken for every channel.
    """
    if not torch.compiler.is_compiling():
        return x
    return _stored(x)


@differentiable(lambda ctx, g: (g,))
def _stored(ctx: Any, x: Tensor) -> Tensor:
    """A view with explicit strides: inductor gives its source a place in memory."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap), which limits x to ±cap (Gemma 2); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


@constant
def _has_autocast(kind: str) -> bool:
    """Whether autocast supports this device type; a constant, because torch 2.11 cannot trace the call."""
    return torch.amp.is_autocast_available(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Inside the block, products of x keep their dtype. Does nothing on `meta`, which autocast does not support."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product of x: autocast's dtype under autocast, otherwise x's own."""
    kind = x.device.type
    autocast = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def begins(x: Tensor, segments: Tensor | None) -> Tensor:
    """[B, T]: whether a token of x [B, T, …] starts a document, i.e. its segment differs from the previous token's."""
    if segments is None:
        return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    return pad(segments[:, 1:] != segments[:, :-1], (1, 0))[:, : segments.shape[1]]  # stays empty without tokens
