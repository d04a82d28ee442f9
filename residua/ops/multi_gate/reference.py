"""Multi-Gate Residuals in plain PyTorch (arXiv 2605.23259)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from residua.ops._runtime.numeric import rms, wide

SEGMENT = 2
"""The streams are stored once per this many junctions of a chain."""


def multi_gate(
    streams: Tensor,
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Write a sublayer's output into n streams through gates, then pool the streams into the next input.

        z_i = gate_query · RMS(s_i)/√C + b_i
        competitive: β_i = exp(z_i) / (Σ_j exp(z_j) + exp(b_0));   independent: β_i = sigmoid(z_i)
        s'_i = s_i + β_i (f − s_i),   a = softmax_i(pool_query · RMS(s'_i)/√C),   h = Σ a_i s'_i

    streams [..., N, C], update f [..., C], queries [C]; gate_bias [N+1] (competitive, entry 0 = forget) or [N].
    Returns h [..., C] and s' [..., N, C].
    """
    check(streams.shape, update, gate_bias, competitive)
    beta = gates(streams, gate_query, gate_bias, competitive=competitive, eps=eps)[..., None]
    s = wide(streams)
    s = (s + beta * (wide(update)[..., None, :] - s)).to(streams.dtype)
    return pool(s, pool_query, eps=eps), s


def gates(
    streams: Tensor, gate_query: Tensor, gate_bias: Tensor, *, competitive: bool = True, eps: float = 1e-6
) -> Tensor:
    """β [..., N]: how much each stream moves towards the update."""
    z = _score(streams, gate_query, eps)
    if competitive:
        forget = gate_bias[0].to(z.dtype).expand(z.shape[:-1])[..., None]
        return torch.cat([forget, z + gate_bias[1:]], -1).softmax(-1)[..., 1:]
    return torch.sigmoid(z + gate_bias)


def pool_weights(streams: Tensor, pool_query: Tensor, *, eps: float = 1e-6) -> Tensor:
    """a [..., N]: the share of each stream in the next input."""
    return _score(streams, pool_query, eps).softmax(-1)


def pool(streams: Tensor, pool_query: Tensor, *, eps: float = 1e-6) -> Tensor:
    """h = Σ a_i s_i."""
    return (pool_weights(streams, pool_query, eps=eps)[..., None] * wide(streams)).sum(-2).to(streams.dtype)


def _score(streams: Tensor, query: Tensor, eps: float) -> Tensor:
    s = wide(streams)
    return (rms(s, eps) * query.to(s.dtype)).sum(-1) / s.shape[-1] ** 0.5


def check(shape: Sequence[int], update: Tensor, gate_bias: Tensor, competitive: bool) -> None:
    """Check that f and the biases fit streams of this shape."""
    *lead, n, width = shape
    if update.shape != (*lead, width):
        raise ValueError(
            f"multi_gate: update has shape {tuple(update.shape)}, streams {tuple(shape)}: "
            "expected the shape of the streams without axis N."
        )
    if gate_bias.shape != (n + competitive,):
        kind = "competitive" if competitive else "independent"
        raise ValueError(
            f"multi_gate: gate_bias has shape {tuple(gate_bias.shape)}, {kind} gates over {n} streams need "
            f"({n + competitive},)."
        )


def pool_streams(streams: Sequence[Tensor], query: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A junction of the fill phase: h [..., C] of n ≥ 2 streams [..., C], and the streams to continue with.

        a = softmax_i(query · RMS(s_i)/√C),   h = Σ a_i s_i

    The streams are returned unchanged. Later reads should use the returned ones: the fused path then adds this read's
    gradient to that of later reads in the same pass.
    """
    return pool(torch.stack([*streams], -2), query, eps=eps), tuple(streams)


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
    [..., C] after the fill phase; the streams alone are a valid state. The rest belongs to the fused path, which stores
    the streams for the backward pass once per `segment` junctions and recomputes the others exactly.
    """
    streams, _ = split(state, update)
    stacked = streams[0] if len(streams) == 1 else torch.stack(streams, -2)
    hidden, after = multi_gate(stacked, update, gate_query, gate_bias, pool_query, competitive=competitive, eps=eps)
    return hidden, (after,)


def split(state: Sequence[Tensor], update: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The streams of a state, and the tensors that follow them."""
    one = state[0].dim() > update.dim()
    return ([state[0]], [*state[1:]]) if one else ([*state], [])


def shape(streams: Sequence[Tensor]) -> tuple[int, ...]:
    """[..., N, C]"""
    first = streams[0].shape
    return tuple(first) if len(streams) == 1 else (*first[:-1], len(streams), first[-1])
