"""Attention over depth, fused: operators and gradients, for one read and for a whole model's reads (`deferred.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from residua.ops._runtime.launch import handle
from residua.ops._runtime.tracing import in_graph, opaque
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
    h: Tensor = _attend(eps, u, *sources)
    return h


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, u: Tensor, *sources: Tensor) -> Tensor:
        values = [v.contiguous() for v in sources]
        h, lse, scores, rstd = launch.depth_attend(values, u, eps)
        ctx.save_for_backward(u, h, lse, scores, rstd, *values)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        u, h, lse, scores, rstd, *values = ctx.saved_tensors
        du, *dv = launch.depth_attend_backward(values, u, dh.contiguous(), h, lse, scores, rstd)
        return None, du, *dv


_attend = opaque(_Attend)


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, chain: Tensor, value: Tensor, scores: Tensor, rstd: Tensor, u: Tensor,
        first: int, readers: int, goes_on: bool, handed: int, *before: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.save_for_backward(value, scores, rstd, u, *before[handed:])
        ctx.first, ctx.readers, ctx.goes_on, ctx.handed = first, readers, goes_on, handed
        ctx.set_materialize_grads(False)
        gradients = [handle(value, value.shape) for _ in range(readers + goes_on)]
        stats = [handle(scores, (2, scores.shape[1])) for _ in range(readers)]
        return handle(u, u.shape), *gradients, *stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        value, scores, rstd, u, *led = ctx.saved_tensors
        onward, *of_reads = grads if ctx.goes_on else (None, *grads)
        grown = ctx.handed if not led else 0
        frozen, nothing = [None] * 8, [None] * (ctx.handed - grown + len(led))
        if all(g is None for g in grads):
            return (None, du, *frozen, *[None] * grown, *nothing)
        onward = None if onward is None else onward.contiguous()
        if all(g is None for g in of_reads):
            return (onward, du, *frozen, *[onward] * grown, *nothing)
        dh = [torch.zeros_like(value) if g is None else g for g in of_reads[: ctx.readers]]
        stats = [scores.new_zeros(2, scores.shape[1]) if g is None else g for g in of_reads[ctx.readers :]]
        if led:
            block = [[mine, *led[i::3]] for i, mine in enumerate((value, scores, rstd))]
            du, dv, *handed = launch.depth_block_gradient(*block, u, ctx.first, dh, stats, du)
            return (dv, du, *frozen, *handed, *[None] * len(led))
        dv, du = launch.depth_source_gradient(value, scores, rstd, u, ctx.first, onward, dh, stats, du)
        return (dv, du, *frozen, *[dv] * grown)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compiled: bool, h: Tensor, lse: Tensor, *handles: Tensor) -> Tensor:
        ctx.count, ctx.compiled = len(handles) // 2, compiled
        ctx.save_for_backward(h, lse)
        return h.view_as(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        dh = dh.contiguous()
        stats = (_plain_stats if ctx.compiled else launch.depth_stats)(dh, *ctx.saved_tensors)
        return (None, None, None, *[dh] * ctx.count, *[stats] * ctx.count)


@in_graph
def make_handles(
    y: Tensor, chain: Tensor, value: Tensor, scores: Tensor, rstd: Tensor, u: Tensor,
    first: int, readers: int, goes_on: bool, onward: list[Tensor], led: list[Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    handles: tuple[Tensor, ...] = _Fork.apply(
        y, chain, value, scores, rstd, u, first, readers, goes_on, len(onward), *onward, *led
    )
    return handles


@in_graph
def read(compiled: bool, h: Tensor, lse: Tensor, gradients: list[Tensor], stats: list[Tensor]) -> Tensor:
    read: Tensor = _Read.apply(compiled, h, lse, *gradients, *stats)
    return read


def _plain_stats(dh: Tensor, h: Tensor, lse: Tensor) -> Tensor:
    """`depth_stats` in plain PyTorch: `torch.compile` fuses it into the kernel that computes dh."""
    delta = (dh.float() * h.float()).sum(-1).flatten()
    return torch.stack([lse, pad(delta, (0, len(lse) - len(delta)))])
