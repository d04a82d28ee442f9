"""Multi-Gate Residuals, fused: the junctions of a chain, and the tensors that autograd stores.

A junction need not store its streams. In a chain of junctions only the first of a segment stores them; the others store
f and β. Their backward pass repeats s ← s + β(f − s) from there, in registers and with the same rounding, so streams
agree bit for bit. A repeated junction reads C more values instead of storing n·C more. With every second junction's
streams stored, a model's junctions take 8.77 ms and 3.39 GiB, with all of them 8.22 ms and 5.22 GiB
(docs/lab/kernels.md, `residua bench ops depth --implementations fused`).

With a gain, a junction includes the norm after it. Only compiled code can see that nothing else reads h, so a rewrite
passes the norm's gain (`train/compile/rewrites/normed_junctions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.tracing import differentiable
from residua.ops.multi_gate import inversion, launch
from residua.ops.multi_gate.reference import SEGMENT, check, shape, split


def multi_gate(streams: Tensor, *others: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.multi_gate`: a chain of one junction."""
    hidden, (after, *_) = multi_gate_chain((streams,), *others, **settings, segment=1)
    return hidden, after


def multi_gate_chain(
    state: Sequence[Tensor],
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
    segment: int = SEGMENT,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The fused twin of `reference.multi_gate_chain`.

    Inside a segment the state is the streams, then the streams at its start (one tensor or N), then f and the scalars
    of each junction since.
    """
    streams, past = split(state, update)
    check(shape(streams), update, gate_bias, competitive)
    streams, f = [s.contiguous() for s in streams], update.contiguous()
    weights = (gate_query, gate_bias, pool_query)
    hidden, after, stats = _junction(streams, f, *weights, past, competitive, eps)
    past = [*(past or [s.detach() for s in streams]), f.detach(), stats]
    done = (len(past) - starts(past, f)) // 2
    return hidden, (after, *(past if done < segment else ()))


def starts(past: Sequence[Tensor], update: Tensor) -> int:
    """How many of `past` are the streams at the segment's start; the rest are f and [..., 5N + 2], alternating."""
    return 1 if past[0].dim() > update.dim() else past[-1].shape[-1] // 5


def pool_streams(streams: Sequence[Tensor], query: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The fused twin of `reference.pool_streams`."""
    hidden, *after = _pool([s.contiguous() for s in streams], query, eps)
    return hidden, tuple(after)


def _junction_backward(ctx: Any, g_hidden: Tensor | None, g_after: Tensor | None, _: None) -> Sequence[Any]:
    gate_query, pool_query, *saved = ctx.saved_tensors
    if g_hidden is None:
        g_hidden = torch.zeros_like(saved[-2])
    junction = starts(saved, g_hidden)
    start, since = saved[:junction], saved[junction:]
    passed_on = [] if g_after is None else [g_after]
    *g_streams, g_update, g_rest = launch.backward(
        g_hidden, passed_on, start, since[::2], since[1::2], gate_query, pool_query,
        ctx.count > 1, ctx.competitive, ctx.eps,
    )  # fmt: skip
    dtypes = (gate_query.dtype, ctx.bias_dtype, pool_query.dtype)
    return g_streams, g_update, *_apart(g_rest, dtypes, g_hidden.shape[-1], ctx.competitive)


@differentiable(_junction_backward)
def _junction(
    ctx: Any, streams: list[Tensor], update: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor,
    past: list[Tensor], competitive: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Backward recomputes the streams from `past`; without it, the streams themselves are stored."""
    weights = (gate_query, gate_bias, pool_query)
    hidden, after, stats = launch.forward(streams, update, *weights, competitive, eps)
    ctx.competitive, ctx.eps, ctx.count, ctx.bias_dtype = competitive, eps, len(streams), gate_bias.dtype
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(gate_query, pool_query, *(past or streams), update, stats)
    return hidden, after, stats


def _apart(row: Tensor, dtypes: Sequence[torch.dtype], width: int, competitive: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Split one row [2C + N + 1] into the gradients of w1, the biases and w2; independent gates have no forget bias."""
    gate_query, bias, pool_query = dtypes
    biases = row[2 * width + (not competitive) :]
    return row[:width].to(gate_query), biases.to(bias), row[width : 2 * width].to(pool_query)


class Fused(inversion.Plain):
    """`inversion.Plain` with kernels."""

    def forward(self, streams: Sequence[Tensor], update: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, after, stats = launch.forward(streams, update, *weights, **self.settings)
        return hidden, after, stats

    def invert(self, after: Tensor, update: Tensor, stats: Tensor) -> Tensor:
        return launch.invert(after, update, stats, inversion.FLOOR)

    def backward(
        self, g_hidden: Tensor, g_after: Tensor | None, streams: Tensor, update: Tensor, stats: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        gate_query, _, pool_query = weights
        passed_on = [] if g_after is None else [g_after]
        saved = ([streams], [update], [stats], gate_query, pool_query)
        g_streams, g_update, g_rest = launch.backward(g_hidden, passed_on, *saved, False, **self.settings)
        dtypes, width = [w.dtype for w in weights], g_hidden.shape[-1]
        return g_streams, g_update, *_apart(g_rest, dtypes, width, self.settings["competitive"])


inversion.HALVES["fused"] = Fused

multi_gate_inverted = partial(inversion.junction, "fused")
"""The fused twin of `inversion.multi_gate_inverted`."""


def _pool_backward(ctx: Any, g_hidden: Tensor | None, *g_after: Tensor | None) -> Sequence[Any]:
    query, stats, *streams = ctx.saved_tensors
    if g_hidden is None:
        return (g_after,)
    passed_on = [torch.zeros_like(g_hidden) if g is None else g for g in g_after]
    passed_on = [] if all(g is None for g in g_after) else passed_on
    *g_streams, g_query = launch.pool_backward(g_hidden, passed_on, streams, query, stats, ctx.eps)
    return g_streams, g_query.to(query.dtype)


@differentiable(_pool_backward)
def _pool(ctx: Any, streams: list[Tensor], query: Tensor, eps: float) -> tuple[Tensor, ...]:
    hidden, stats = launch.pool(streams, query, eps)
    ctx.eps = eps
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, stats, *streams)
    return hidden, *(s.view_as(s) for s in streams)
