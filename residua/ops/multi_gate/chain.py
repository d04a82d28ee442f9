"""Junctions one after another, with memory in mind."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residua.ops.multi_gate import reference

SEGMENT = 4


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

    The equations are those of `multi_gate`. The first tensor of a state is the streams [..., N, C], and the streams
    alone are a state. What follows them is the fused path's own: it keeps the streams for the backward pass once per
    `segment` junctions and makes the others again, exactly.
    """
    hidden, streams = reference.multi_gate(
        state[0], update, gate_query, gate_bias, pool_query, competitive=competitive, eps=eps
    )
    return hidden, (streams,)
