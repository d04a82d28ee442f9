"""Small pieces of arithmetic that several reference operators share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import `torch._dynamo` at once: seconds, often for nothing.

    Tracing calls the function and keeps its result as a constant.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def wide(x: Tensor) -> Tensor:
    """At least float32: half-precision tensors are reduced in single precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms(x: Tensor, eps: float = 1e-6, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, times the gain if there is one; in x's own dtype."""
    w = wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def mix_slices(weights: Tensor, x: Tensor) -> Tensor:
    """Σ_j w_ij x_j [..., i, C] of few slices x [..., j, C], at least in float32; w [..., i, j] is so, or [i, j].

    Compiled, matrices this small are slow in a matrix library, and their operands are copied for it. As sums they are
    part of the kernels around them. The gradient of w is summed over channels first, then over tokens: x is read once,
    not once for each of its numbers. x is widened in the product: a copy that several sums read would be written.
    """
    if not torch.compiler.is_compiling():
        return weights @ wide(x)
    each = weights.expand(*x.shape[:-2], -1, -1)
    return (each[..., None] * x[..., None, :, :]).sum(-2)


def few_products(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x Wᵀ [..., K] for a W [K, C] of few rows, `rows` at a time where it is compiled, as sums of their own kernels."""
    if not torch.compiler.is_compiling():
        return linear(x, weight)
    return torch.cat([(x[..., None, :] * part).sum(-1) for part in weight.split(rows)], -1)


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap), which keeps x within ±cap (Gemma 2); x itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


@constant
def _has_autocast(kind: str) -> bool:
    """Whether autocast supports this kind of device; a constant, for torch 2.11 cannot trace the call."""
    return torch.amp.is_autocast_available(kind)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Inside, products of x keep their dtype. Nothing to do on `meta`, which autocast does not support."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else nullcontext()


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product of x is computed in: autocast's inside it, x's own elsewhere."""
    kind = x.device.type
    autocast = _has_autocast(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else x.dtype


def begins(x: Tensor, segments: Tensor | None) -> Tensor:
    """[B, T]: whether a token of x [B, T, …] begins a document, its segment being another than the token's before."""
    if segments is None:
        return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    return pad(segments[:, 1:] != segments[:, :-1], (1, 0))[:, : segments.shape[1]]  # of no tokens, none
