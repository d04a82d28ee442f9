"""The gated delta rule, fused: operators and gradients.

Kept for backward beside q, k and v: the state that each chunk of 64 tokens meets and u, in v's dtype, two matrices
[64, 64] per chunk and head, and six numbers per token and head. For heads of 128 that is four times as much as v.
Recomputing the states instead would repeat the forward pass, whose chunks have to wait for each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime.library import operator
from residua.ops._runtime.numeric import begins
from residua.ops._runtime.tracing import in_graph
from residua.ops.gated_delta import launch
from residua.ops.gated_delta.reference import check_shapes, initial_state

_forward = operator(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? begins, Tensor? state, bool keep) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.forward,
    launch.forward_outputs,
)
_backward = operator(
    "gated_delta_backward(Tensor d_o, Tensor? d_last, Tensor q, Tensor k, Tensor v, Tensor inverse, Tensor reads, "
    "Tensor rates, Tensor states, Tensor u, bool from_state) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)


_step = operator(
    "gated_delta_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state) -> Tensor",
    launch.step,
    launch.step_outputs,
)


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.chunked`."""
    check_shapes(q, k, v, g, beta)
    first = None if segments is None else begins(v, segments).to(torch.uint8)
    given = q.to(v.dtype), k.to(v.dtype), v, g.float(), beta.float(), None if state is None else state.float()
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    return _apply(*given, first, keep)


def step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.step`, without gradients; a state that is float32 and dense is overwritten."""
    state = initial_state(k, v, state).contiguous()
    o: Tensor = _step(q, k, v, g.float(), beta.float(), state)
    return o, state


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
        first: Tensor | None, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, last, *kept = _forward(q, k, v, g, beta, first, state, keep)
        ctx.from_state = state is not None
        ctx.save_for_backward(q, k, v, *kept)
        ctx.set_materialize_grads(False)
        return o, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *kept = ctx.saved_tensors
        if d_o is None and d_last is None:
            return (None,) * 8
        d_o = torch.zeros_like(v) if d_o is None else d_o
        dq, dk, dv, dg, dbeta, d_state = _backward(d_o, d_last, q, k, v, *kept, ctx.from_state)
        # each key head serves a run of value heads
        dq, dk = (d.unflatten(2, (k.shape[2], -1)).sum(3).to(k.dtype) if d.shape != k.shape else d for d in (dq, dk))
        return dq, dk, dv, dg, dbeta, d_state if ctx.from_state else None, None, None


@in_graph
def _apply(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, first: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = _GatedDelta.apply(q, k, v, g, beta, state, first, keep)
    return made
