"""Delta rules, fused: operators and gradients.

Both rules are fused completely (`residua bench ops gated_delta kimi_delta` also times flash-linear-attention). Backward
needs q, k and v, and in v's dtype u and the state before each chunk of 64 tokens. It also needs two matrices [64, 64]
per chunk and head, and six numbers per token and head. For heads of 128 that is four times as much as v. Recomputing
the states would repeat the forward pass, whose chunks depend on each other.

A decay per channel adds the sums of log decays in float32, three decayed copies of keys and queries, and a third
matrix: for heads of 128, five and a half times as much as v.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.numeric import begins
from residua.ops._runtime.tracing import differentiable
from residua.ops.delta_rule import launch
from residua.ops.delta_rule.reference import check_shapes, initial_state


def delta_rule(
    per_channel: bool, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
    segments: Tensor | None = None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The fused twin of `reference.gated_delta` or, with `per_channel`, of `reference.kimi_delta`."""
    check_shapes(q, k, v, g, beta, per_channel=per_channel)
    first = None if segments is None else begins(v, segments).to(torch.uint8)
    inputs = q.to(v.dtype), k.to(v.dtype), v, g.float(), beta.float(), None if state is None else state.float()
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return _delta(*inputs, first, keep)


gated_delta, kimi_delta = partial(delta_rule, False), partial(delta_rule, True)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.step`, without gradients; overwrites a state that is float32 and dense."""
    state = initial_state(k, v, state).contiguous()
    return launch.step(q, k, v, g.float(), beta.float(), state), state


def _delta_backward(ctx: Any, d_o: Tensor | None, d_last: Tensor | None) -> Sequence[Tensor | None]:
    q, k, v, *saved = ctx.saved_tensors
    if d_o is None and d_last is None:
        return ()
    d_o = torch.zeros_like(v) if d_o is None else d_o
    dq, dk, dv, dg, dbeta, d_state = launch.backward(d_o, d_last, q, k, v, saved, ctx.from_state)
    # each key head serves a run of value heads
    dq, dk = (d.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype) if d.shape != k.shape else d for d in (dq, dk))
    return dq, dk, dv, dg, dbeta, d_state if ctx.from_state else None


@differentiable(_delta_backward)
def _delta(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, first: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o, last, *saved = launch.forward(q, k, v, g, beta, first, state, keep)
    ctx.from_state = state is not None
    ctx.save_for_backward(q, k, v, *saved)
    ctx.set_materialize_grads(False)
    return o, last


def delta_mixer(
    projected: Tensor,
    g: Tensor,
    beta: Tensor,
    convolution: Tensor,
    gain: Tensor,
    key_heads: int,
    *,
    segments: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `mixer.delta_mixer`."""
    first = None if segments is None else begins(projected, segments).to(torch.uint8)
    inputs = projected, g.float(), beta.float(), convolution, gain
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    return _delta_mixer(*inputs, first, key_heads, eps, keep)


def _delta_mixer_backward(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> Sequence[Tensor]:
    if dy is None and d_last is None:
        return ()
    projected, convolution, gain, first, *saved = ctx.saved_tensors
    dy = torch.zeros_like(saved[3]) if dy is None else dy
    *gradients, d_convolution, d_gain = launch.mixer_backward(
        dy, d_last, projected, convolution, gain, first, saved, ctx.eps
    )
    return *gradients, d_convolution.to(convolution.dtype), d_gain.to(gain.dtype)


@differentiable(_delta_mixer_backward)
def _delta_mixer(
    ctx: Any, projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, first: Tensor | None,
    key_heads: int, eps: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y, last, *saved = launch.mixer(projected, g, beta, convolution, gain, first, key_heads, eps, keep)
    ctx.save_for_backward(projected, convolution, gain, first, *saved)
    ctx.eps = eps
    ctx.set_materialize_grads(False)
    return y, last
