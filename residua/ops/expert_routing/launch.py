"""Routing, fused: the router's product, its softmax, the choices, the order of the slots, and all sums over tokens.

The backward pass needs only logits and choices, a few floats per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, aligned, cdiv, dense_like, next_power_of_2, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.tracing import differentiable
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors
from residua.ops.expert_routing.reference import Routed

kernels = Kernels("residua.ops.expert_routing.kernels")

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def lanes(experts: int) -> int:
    """The number of experts rounded up to a power of two; products need at least 16 columns."""
    return max(16, next_power_of_2(experts))


def _tokens(x: Tensor, experts: int) -> int:
    """Tokens per block: few enough that registers hold the scores of all experts, and the products in float32."""
    return max(16, min(64, 2048 // lanes(experts))) if x.dtype is torch.bfloat16 else 16


def _columns(x: Tensor, experts: int) -> int:
    """Columns per tile of gradients."""
    if x.dtype is torch.bfloat16:
        return 128 if lanes(experts) <= 64 else 64
    return 16 if INTERPRETED else 32


@launcher("expert_routing")
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, normalize: bool, sigmoid: bool, scale: float
) -> Iterator[Outputs]:
    """The fields of `reference.Routed`, then the logits [N, E]."""
    (tokens, width), experts = x.shape, len(weight)
    single, whole = (x.new_empty(0, dtype=dtype) for dtype in (torch.float32, torch.int32))
    weights, chosen = single.new_empty((tokens, top_k)), whole.new_empty((tokens, top_k))
    order, ends = whole.new_empty(tokens * top_k), whole.new_empty(experts)
    load, probability, z = single.new_empty(experts), single.new_empty(experts), single.new_empty(())
    logits = single.new_empty((tokens, experts))
    yield weights, chosen, order, ends, load, probability, z, logits
    block = _tokens(x, experts)
    blocks, wide = cdiv(tokens, block), lanes(experts)
    counts, before = ends.new_empty((2, blocks, experts))
    totals, sums, squares = torch.empty_like(ends), z.new_empty((blocks, experts)), z.new_empty(blocks)
    warps = 8 if wide > 64 else 4
    kernels.route_kernel[(blocks,)](
        aligned(x), weight.contiguous(), weight if bias is None else bias, logits, weights, chosen, counts, sums,
        squares, tokens, float(scale), C=width, E=experts, WIDE=wide, CHOICES=top_k, SIGMOID=sigmoid,
        BIASED=bias is not None, NORMALIZED=normalize, TOKENS=block, DEPTH=64 if x.dtype is torch.bfloat16 else 16,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    kernels.scan_kernel[(cdiv(experts, 16),)](
        counts, sums, squares, before, totals, load, probability, z, blocks, tokens, E=experts, CHOICES=top_k,
        EXPERTS=16, BLOCK=128, num_warps=4,
    )  # fmt: skip
    kernels.place_kernel[(blocks,)](
        chosen, before, totals, order, ends, tokens, E=experts, WIDE=next_power_of_2(experts), CHOICES=top_k,
        TOKENS=block, num_warps=warps,
    )  # fmt: skip


@launcher("expert_routing_backward")
def backward(
    g_weights: Tensor, g_probability: Tensor, g_z: Tensor, x: Tensor, weight: Tensor, logits: Tensor, chosen: Tensor,
    normalize: bool, sigmoid: bool, scale: float,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """The gradients of x [N, C] and of the weight [E, C]."""
    g_x, g_weight = dense_like(x), dense_like(weight)
    yield g_x, g_weight
    (tokens, width), experts = x.shape, len(weight)
    wide = lanes(experts)
    columns, block = _columns(x, experts), _tokens(x, experts)
    tiles = cdiv(width, columns)
    # tokens per program: whole blocks, for about two programs per multiprocessor
    share = block * cdiv(cdiv(tokens, block), max(1, 2 * multiprocessors(x) // tiles))
    shares = cdiv(tokens, share)
    partial = logits.new_empty((shares, experts * width))
    kernels.backward_kernel[(shares, tiles)](
        g_weights.contiguous(), g_probability.contiguous(), g_z, aligned(x), weight.contiguous(), logits, chosen,
        g_x, partial, tokens, share, float(scale), C=width, E=experts, WIDE=wide, CHOICES=chosen.shape[1],
        SIGMOID=sigmoid, NORMALIZED=normalize, TOKENS=block, COLUMNS=columns, num_warps=8 if wide > 64 else 4,
        num_stages=2,
    )  # fmt: skip
    sum_rows(partial, g_weight)


def route(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    score: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    groups: tuple[int, int, int] | None = None,
    offset: Tensor | None = None,
) -> Routed:
    """The fused twin of `reference.route`; only the reference supports offsets and groups."""
    return Routed(*_route(x, weight, bias, top_k, normalize, score == "sigmoid", scale))


def _route_backward(ctx: Any, *g: Tensor) -> Sequence[Tensor]:
    g_weights, *_, g_probability, g_z = g
    return backward(g_weights, g_probability, g_z, *ctx.saved_tensors, *ctx.settings)


@differentiable(_route_backward)
def _route(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, normalize: bool, sigmoid: bool, scale: float
) -> tuple[Tensor, ...]:
    *routed, logits = forward(x, weight, bias, top_k, normalize, sigmoid, scale)
    _, chosen, order, ends, load, _, _ = routed
    ctx.save_for_backward(x, weight, logits, chosen)
    ctx.settings = normalize, sigmoid, scale
    ctx.mark_non_differentiable(chosen, order, ends, load)
    return tuple(routed)
