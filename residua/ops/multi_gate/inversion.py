"""Junctions that store no streams: the backward pass recovers them from the streams after the junction.

    s'_i = s_i + β_i (f − s_i)   ⇒   s_i = (s'_i − β_i f) / (1 − β_i)

is the fallback inversion of Multi-Gate Residuals (arXiv 2605.23259). Only the last junction of a chain stores its
streams. Each passes the recovered streams to the one before it in place of a gradient: the chain's state ends with a
tensor without content (`link`) whose "gradient" is s. A junction stores f and β.

Streams are rounded when they are stored, and division by 1 − β amplifies that error: after m junctions it is about
ε √m Π 1/(1 − β). Where β is large, s cannot be recovered, so the true s is stored for the `share` of all (token,
stream) pairs with the largest β, a fixed number. For the others, 1 − β is at least FLOOR.

A junction called with `last` stores its streams and passes the true ones on, which resets the error below it.
`junctions_to_keep` chooses such junctions by their gates; telemetry calls it during training.

In a separate file because it serves both backends, the plain one and `autograd.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.numeric import wide
from residua.ops._runtime.tracing import differentiable
from residua.ops.multi_gate import reference
from residua.ops.multi_gate.reference import check, shape, split

SHARE = 0.01
FLOOR = 1 / 64
MAX_AMPLIFIED_ERROR = 0.25
"""The most that ε Π 1/(1 − β) may be along junctions that invert: beyond it gradients become visibly worse than with
kept streams (docs/reference/topology-notes.md)."""
UNBOUNDED_AMPLIFICATION = 2.0**40
"""The amplification reported where 1 − β is below FLOOR: beyond any bound."""
ERROR_HEADROOM = 8.0
"""When junctions start to store streams, the error drops this factor below the limit, so that it rarely happens."""


def amplification(beta: Tensor, share: float) -> Tensor:
    """1/(1 − β) for the largest β [..., N] whose streams are not stored; unbounded where 1 − β is below FLOOR."""
    ordered = wide(beta).flatten().sort(descending=True).values
    stored = math.ceil(share * len(ordered))
    left = 1 - ordered[stored] if stored < len(ordered) else torch.ones_like(ordered[0])
    return torch.where(left < FLOOR, UNBOUNDED_AMPLIFICATION, 1 / left)


def junctions_to_keep(amplified: Mapping[int, float], kept: Collection[int], epsilon: float) -> list[int]:
    """Further junctions that should store their streams; none while ε Π 1/(1 − β) is within the limit.

    `amplified`: `amplification` by junction. `epsilon`: the relative rounding error of a stored stream.
    """
    if not _exceeding(amplified, kept, MAX_AMPLIFIED_ERROR / epsilon):
        return []
    return _exceeding(amplified, kept, MAX_AMPLIFIED_ERROR / epsilon / ERROR_HEADROOM)


def _exceeding(amplified: Mapping[int, float], kept: Collection[int], most: float) -> list[int]:
    """Backwards along the chain, the junctions at which the product exceeds `most`; each resets it."""
    chosen, product = [], 1.0
    for k in sorted(amplified, reverse=True):
        product *= amplified[k]
        if k in kept or product > most:
            chosen += [] if k in kept else [k]
            product = 1.0
    return chosen[::-1]


class Plain:
    """A junction without autograd, forward and backward; here the reference, which autograd differentiates."""

    def __init__(self, competitive: bool, eps: float) -> None:
        self.settings: dict[str, Any] = {"competitive": competitive, "eps": eps}

    def forward(self, streams: Sequence[Tensor], update: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [..., C], s' [..., N, C] and numbers that begin with β [..., N]."""
        stacked = streams[0] if len(streams) == 1 else torch.stack([*streams], -2)
        beta = reference.gates(stacked, *weights[:2], **self.settings)
        return *reference.multi_gate(stacked, update, *weights, **self.settings), beta

    def invert(self, after: Tensor, update: Tensor, stats: Tensor) -> Tensor:
        """s [..., N, C] from s' and f."""
        beta, f = stats[..., None], wide(update)[..., None, :]
        return ((wide(after) - beta * f) / (1 - beta).clamp(min=FLOOR)).to(after.dtype)

    def backward(
        self, g_hidden: Tensor, g_after: Tensor | None, streams: Tensor, update: Tensor, stats: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of s [..., N, C], of f, and of w1, the biases and w2."""
        leaves = [t.detach().requires_grad_() for t in (streams, update, *weights)]
        with torch.enable_grad():
            outputs = reference.multi_gate(*leaves, **self.settings)
        gradients = (g_hidden, torch.zeros_like(streams) if g_after is None else g_after)
        return torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True)


HALVES: dict[str, type[Plain]] = {"plain": Plain}


def multi_gate_inverted(
    state: Sequence[Tensor],
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    *,
    last: bool,
    share: float = SHARE,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One junction of a chain, like `multi_gate_chain`; the backward pass recovers its streams by inversion.

    `last`: no junction follows that could pass its streams back, so this one keeps them. Use a state once only.
    """
    weights = (gate_query, gate_bias, pool_query)
    return junction("plain", state, update, *weights, last=last, share=share, competitive=competitive, eps=eps)


def junction(
    halves: str, state: Sequence[Tensor], update: Tensor, *weights: Tensor,
    last: bool, share: float = SHARE, competitive: bool = True, eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
    """h and the next state: the streams and, except for the last junction, the link to the next one."""
    streams, link = split(state, update)
    check(shape(streams), update, weights[1], competitive)
    streams = [s.contiguous() for s in streams]
    stored = -1 if last or not torch.is_grad_enabled() else math.ceil(share * math.prod(shape(streams)[:-1]))
    hidden, *after = _inverted(streams, update.contiguous(), list(weights), link, halves, competitive, eps, stored)
    return hidden, tuple(after)


def _inverted_backward(
    ctx: Any, g_hidden: Tensor | None, g_after: Tensor | None, after: Tensor | None = None
) -> Sequence[Any]:
    update, stats, *saved = ctx.saved_tensors
    weights, rest = saved[:3], saved[3:]
    if ctx.last:
        streams = rest[0] if ctx.count == 1 else torch.stack(rest, -2)
    elif after is None:
        raise RuntimeError(
            "multi_gate_inverted: the next junction took no part in the backward pass, so its streams are "
            "unknown: call the last junction of a chain with last=True."
        )
    else:
        where, rows = rest
        recovered = ctx.halves.invert(after, update, stats)
        streams = recovered.flatten(0, -2).index_copy_(0, where, rows).view_as(recovered)
    g_hidden = torch.zeros_like(update) if g_hidden is None else g_hidden
    g_streams, g_update, *g_weights = ctx.halves.backward(g_hidden, g_after, streams, update, stats, *weights)
    apart = [g_streams] if ctx.count == 1 else g_streams.unbind(-2)
    return apart, g_update, g_weights, [streams] * ctx.linked


@differentiable(_inverted_backward)
def _inverted(
    ctx: Any, streams: list[Tensor], update: Tensor, weights: list[Tensor], link: list[Tensor], halves: str,
    competitive: bool, eps: float, stored: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`link` is that to the junction before this one, if any.

    The number of rows to store is `stored`; −1: all, since no junction follows.
    """
    ctx.halves = HALVES[halves](competitive, eps)
    hidden, after, stats = ctx.halves.forward(streams, update, *weights)
    ctx.last, ctx.count, ctx.linked = stored < 0, len(streams), len(link)
    ctx.set_materialize_grads(False)
    if ctx.last:
        ctx.save_for_backward(update, stats, *weights, *streams)
        return hidden, after
    where = stats[..., : after.shape[-2]].flatten().topk(stored).indices
    ctx.save_for_backward(update, stats, *weights, where, _rows(streams, where))
    return hidden, after, after.new_empty(()).expand(after.shape)


def _rows(streams: Sequence[Tensor], where: Tensor) -> Tensor:
    """The rows [kept, C] of streams [..., N, C], or of N streams [..., C], at places among all M·N rows."""
    if len(streams) == 1:
        return streams[0].flatten(0, -2).index_select(0, where)
    n = len(streams)
    token, stream = where // n, where % n
    rows = streams[0].flatten(0, -2).index_select(0, token)
    for i in range(1, n):
        rows = torch.where((stream == i)[:, None], streams[i].flatten(0, -2).index_select(0, token), rows)
    return rows
