"""Junctions one after another, with memory in mind: the fill phase, then writes through gates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.ops.multi_gate import reference

SEGMENT = 2


def pool_streams(streams: Sequence[Tensor], query: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A junction of the fill phase: h [..., C] of n ≥ 2 streams [..., C], and the streams to go on with.

        a = softmax_i(query · RMS(s_i)/√C),   h = Σ a_i s_i

    The streams that come back are those that went in. Who reads them next should take these: the fused path adds a
    read's gradient to the one that arrives from later readers in the same pass.
    """
    return reference.pool(torch.stack([*streams], -2), query, eps=eps), tuple(streams)


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
    """One junction of a chain: h [..., C] and the next state, from a state and a sublayer's output.

    The equations are those of `multi_gate`. A state begins with the streams: one tensor [..., N, C], or N tensors
    [..., C], as the fill phase leaves them; the streams alone are a state. What follows them is the fused path's own:
    it keeps the streams for the backward pass once per `segment` junctions and makes the others again, exactly.
    """
    streams, _ = split(state, update)
    stacked = streams[0] if len(streams) == 1 else torch.stack(streams, -2)
    hidden, after = reference.multi_gate(
        stacked, update, gate_query, gate_bias, pool_query, competitive=competitive, eps=eps
    )
    return hidden, (after,)


def split(state: Sequence[Tensor], update: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The streams of a state, and what follows them."""
    one = state[0].dim() > update.dim()
    return ([state[0]], [*state[1:]]) if one else ([*state], [])


def shape(streams: Sequence[Tensor]) -> tuple[int, ...]:
    """[..., N, C]"""
    first = streams[0].shape
    return tuple(first) if len(streams) == 1 else (*first[:-1], len(streams), first[-1])
