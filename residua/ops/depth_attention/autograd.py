"""Fused attention over depth: operators and gradients, for one read and for all of a model (`source_gradients.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.launch import handle
from residua.ops._runtime.tracing import differentiable
from residua.ops.depth_attention import launch, reference
from residua.ops.depth_attention.reference import Activation, KeyNorm


def depth_attention(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    norm_weight: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    key_norm: KeyNorm = "rms",
    activation: Activation = "softmax",
    return_weights: bool = False,
) -> Any:
    """The fused twin of `reference.depth_attention`: one pass over the sources, forward and backward.

    A single source has weight 1 for any query, so the query's gradient is exactly zero. The plain code returns that;
    the kernel's δ − dh · v would leave a rounding error.
    """
    if len(sources) == 1:
        return reference.depth_attention(sources, query, norm_weight=norm_weight, scale=scale, eps=eps)
    u = scale * query.float() * (1.0 if norm_weight is None else norm_weight.float())
    return _attend(list(sources), u, eps)


def _attend_backward(ctx: Any, dh: Tensor) -> Sequence[Any]:
    u, h, lse, scores, rstd, *values = ctx.saved_tensors
    du, *dv = launch.depth_attend_backward(values, u, dh.contiguous(), h, lse, scores, rstd)
    return dv, du


@differentiable(_attend_backward)
def _attend(ctx: Any, sources: list[Tensor], u: Tensor, eps: float) -> Tensor:
    values = [v.contiguous() for v in sources]
    h, lse, scores, rstd = launch.depth_attend(values, u, eps)
    ctx.save_for_backward(u, h, lse, scores, rstd, *values)
    return h


def _handles_backward(ctx: Any, du: Tensor | None, *grads: Tensor | None) -> Sequence[Any]:
    value, scores, rstd, u, *led = ctx.saved_tensors
    onward, *of_reads = grads if ctx.goes_on else (None, *grads)
    if all(g is None for g in grads):
        return None, du
    onward = None if onward is None else onward.contiguous()
    if all(g is None for g in of_reads):
        return onward, du, None if led else [onward] * ctx.passes_to
    dh = [torch.zeros_like(value) if g is None else g for g in of_reads[: ctx.readers]]
    stats = [scores.new_zeros(2, scores.shape[1]) if g is None else g for g in of_reads[ctx.readers :]]
    if led:
        block = [[mine, *led[i::3]] for i, mine in enumerate((value, scores, rstd))]
        du, dv, *handed = launch.depth_block_gradient(*block, u, ctx.first, dh, stats, du)
        return dv, du, handed
    dv, du = launch.depth_source_gradient(value, scores, rstd, u, ctx.first, onward, dh, stats, du)
    return dv, du, [dv] * ctx.passes_to


@differentiable(_handles_backward)
def make_handles(
    ctx: Any, y: Tensor, chain: Tensor, before: list[Tensor], led: list[Tensor], value: Tensor, scores: Tensor,
    rstd: Tensor, u: Tensor, first: int, readers: int, goes_on: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    ctx.save_for_backward(value, scores, rstd, u, *led)
    ctx.first, ctx.readers, ctx.goes_on, ctx.passes_to = first, readers, goes_on, len(before)
    ctx.set_materialize_grads(False)
    gradients = [handle(value, value.shape) for _ in range(readers + goes_on)]
    stats = [handle(scores, (2, scores.shape[1])) for _ in range(readers)]
    return handle(u, u.shape), *gradients, *stats


def _read_backward(ctx: Any, dh: Tensor) -> Sequence[Any]:
    dh = dh.contiguous()
    stats = (_plain_stats if ctx.compiled else launch.depth_stats)(dh, *ctx.saved_tensors)
    return [dh] * ctx.count, [stats] * ctx.count


@differentiable(_read_backward)
def read(ctx: Any, gradients: list[Tensor], stats: list[Tensor], h: Tensor, lse: Tensor, compiled: bool) -> Tensor:
    """h; the gradients of the handles are dh and (lse, δ)."""
    ctx.count, ctx.compiled = len(gradients), compiled
    ctx.save_for_backward(h, lse)
    return h.view_as(h)


def _plain_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    """`depth_stats` in plain PyTorch: `torch.compile` fuses it into the kernel that computes dh."""
    delta = (dh.float() * h.float()).sum(-1).flatten()
    return torch.stack([lse, pad(delta, (0, len(lse) - len(delta)))])
