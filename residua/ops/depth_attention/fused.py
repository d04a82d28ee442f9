"""`depth_attention` on fused kernels: one read, in one pass over its sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime import fused as shared
from residua.ops._runtime.addresses import addresses
from residua.ops._runtime.launch import aligned, divided, extent, on, operator
from residua.ops.depth_attention import reference
from residua.ops.depth_attention.launch import (
    UNROLL,
    kernels,
    pitch,
    row_tile,
    shares,
)
from residua.ops.depth_attention.reference import Activation, KeyNorm


def attend(
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
    """`depth_attention` in one pass over the sources; its backward reads each once and writes its gradient once.

    One source alone has weight 1 whatever the query, whose gradient is exactly zero: the plain code says so, where
    δ − dh · v would leave a rounding error.
    """
    if len(sources) == 1:
        return reference.depth_attention(sources, query, norm_weight=norm_weight, scale=scale, eps=eps)
    u = scale * query.float() * (1.0 if norm_weight is None else norm_weight.float())
    return _attend(eps, u, *sources)


def serves(
    sources: Sequence[Tensor],
    query: Tensor,
    *,
    norm_weight: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-6,
    key_norm: KeyNorm = "rms",
    activation: Activation = "softmax",
    return_weights: bool = False,
) -> bool:
    """Whether the fused path takes these inputs: sources alike in shape and dtype, where kernels run."""
    if key_norm != "rms" or activation != "softmax" or return_weights or len(sources) == 0:
        return False
    first = sources[0]
    alike = all(v.shape == first.shape and v.dtype == first.dtype and v.device == first.device for v in sources)
    return alike and query.shape == first.shape[-1:] and shared.serves(first)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, eps: float, u: Tensor, *sources: Tensor) -> Tensor:
        values = [v.contiguous() for v in sources]
        h, lse, scores, rstd = depth_attend(values, u, eps)
        ctx.save_for_backward(u, h, lse, scores, rstd, *values)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        u, h, lse, scores, rstd, *values = ctx.saved_tensors
        du, *dv = depth_attend_backward(values, u, dh.contiguous(), h, lse, scores, rstd)
        return None, du, *dv


@torch.compiler.allow_in_graph
def _attend(eps: float, u: Tensor, *sources: Tensor) -> Tensor:
    h: Tensor = _Attend.apply(eps, u, *sources)
    return h


def _attend_outputs(sources: Sequence[Tensor], u: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
    row = pitch(extent(h)[1])
    return h, u.new_empty(row), u.new_empty(len(sources), row), u.new_empty(len(sources), row)


@operator("depth_attend(Tensor[] sources, Tensor u, float eps) -> (Tensor, Tensor, Tensor, Tensor)", _attend_outputs)
def depth_attend(sources: Sequence[Tensor], u: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h [..., C], lse [pitch], scores and rstd [sources, pitch] of one query u [C]."""
    h, lse, scores, rstd = _attend_outputs(sources, u, eps)
    width, tokens = extent(h)
    if tokens:
        sources = [aligned(v) for v in sources]
        tile = row_tile(width)
        with on(h):
            kernels().forward.attend_kernel[(divided(tokens, tile["TOKENS"]),)](
                addresses(sources, ()), aligned(u), h, lse, scores, rstd,
                tokens, len(sources), pitch(tokens), eps, UNROLL=UNROLL, **tile,
            )  # fmt: skip
    return h, lse, scores, rstd


def _attend_gradients(
    sources: Sequence[Tensor], u: Tensor, dh: Tensor, h: Tensor, lse: Tensor, scores: Tensor, rstd: Tensor
) -> list[Tensor]:
    return [torch.empty_like(u), *(torch.empty_like(v) for v in sources)]


@operator(
    "depth_attend_backward(Tensor[] sources, Tensor u, Tensor dh, Tensor h, Tensor lse, Tensor scores, Tensor rstd)"
    " -> Tensor[]",
    _attend_gradients,
)
def depth_attend_backward(
    sources: Sequence[Tensor], u: Tensor, dh: Tensor, h: Tensor, lse: Tensor, scores: Tensor, rstd: Tensor
) -> list[Tensor]:
    """du [C], then the gradient of each source."""
    grads = [torch.empty_like(v) for v in sources]
    width, tokens = extent(h)
    if tokens == 0:
        return [torch.zeros_like(u), *grads]
    sources = [aligned(v) for v in sources]
    tile = row_tile(width)
    parts, tiles = shares(h, divided(tokens, tile["TOKENS"]), per_core=16)
    du_parts = u.new_empty(parts, width)
    with on(h):
        kernels().backward.attend_backward_kernel[(parts,)](
            addresses(sources, [g.data_ptr() for g in grads]), aligned(u), aligned(dh), h, lse, scores, rstd, du_parts,
            tokens, len(sources), pitch(tokens), tiles, **tile,
        )  # fmt: skip
    return [du_parts.sum(0), *grads]
