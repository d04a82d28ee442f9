"""Operators of a forward pass over whole sequences. None has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residua.ops._runtime.library import operator
from residua.ops.depth_attention.launch import depth_mix_group, depth_scores, depth_sum_scores
from residua.ops.depth_attention.tiles import narrow
from residua.ops.mix_projection.reference import Mixing
from residua.ops.prefill import launch
from residua.ops.prefill.reference import KEY_EPS, Gains, Queries, Streams

_turn_heads = operator(
    "turn_heads(Tensor projected, int heads, int kv_heads, Tensor[] gains, Tensor cos, Tensor sin, float eps)"
    " -> (Tensor, Tensor)",
    launch.turn_heads,
    launch.turn_heads_outputs,
)
_enter_heads = operator(
    "enter_heads(Tensor projected, int heads, Tensor[] gains, Tensor cos, Tensor sin, Tensor(a!) keys,"
    " Tensor(b!) values, Tensor[] mixing, float eps) -> Tensor",
    launch.enter_heads,
    launch.enter_heads_output,
)
_read_norm = operator(
    "read_norm(Tensor[] others, Tensor[] scores, int[] rows, Tensor y, Tensor? base, Tensor query, Tensor weight,"
    " float eps) -> (Tensor, Tensor)",
    launch.read_norm,
    launch.read_norm_outputs,
)
_GATED = "Tensor[] streams, Tensor[] updates, Tensor[] betas, Tensor y, Tensor gate_query, Tensor gate_bias"
_READ = "Tensor pool_query, Tensor weight, bool store, bool competitive, float eps"
# two names for one operator: its kernels take longest to compile, and operators are compiled side by side
_gate_norm = {
    store: operator(f"{name}({_GATED}, {_READ}) -> (Tensor, Tensor)", launch.gate_norm, launch.gate_norm_outputs)
    for store, name in ((True, "gate_norm_stored"), (False, "gate_norm_noted"))
}


def turn_heads(
    projected: Tensor, heads: int, kv_heads: int, gains: Gains | None, cos: Tensor, sin: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.turn_heads`."""
    tables = (cos.contiguous(), sin.contiguous())
    q, k = _turn_heads(_dense(projected), heads, kv_heads, list(gains or ()), *tables, eps)
    return q, k


def enter_heads(
    projected: Tensor,
    heads: int,
    gains: Gains | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    mixing: Mixing | None = None,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """The fused twin of `reference.enter_heads`."""
    tables = (cos.contiguous(), sin.contiguous())
    mixed = list(mixing or ())
    q: Tensor = _enter_heads(_dense(projected), heads, list(gains or ()), *tables, keys, values, mixed, eps)
    return q


def source_scores(y: Tensor, base: Tensor | None, queries: Queries, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.source_scores`."""
    u = queries.parts if narrow(y) else queries.u
    if base is None:
        return depth_scores(y, u, first, count, KEY_EPS)[0], y
    v, z, _ = depth_sum_scores(base, y, u, first, count, KEY_EPS)
    return z, v


def read_group(
    sources: Sequence[Tensor], scores: Sequence[Tensor], rows: Sequence[int], readers: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """The fused twin of `reference.read_group`."""
    lse, *o = depth_mix_group(list(sources), list(scores), list(rows), readers)
    return lse, o


def read_norm(
    others: Sequence[Tensor],
    scores: Sequence[Tensor],
    rows: Sequence[int],
    y: Tensor,
    base: Tensor | None,
    query: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.read_norm`."""
    normed, v = _read_norm(list(others), list(scores), list(rows), y, base, query, weight, eps)
    return normed, y if base is None else v


def gate_norm(
    held: Streams, y: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor, weight: Tensor, *,
    store: bool = True, competitive: bool = True, eps: float = 1e-6,
) -> tuple[Tensor, Streams]:  # fmt: skip
    """The fused twin of `reference.gate_norm`."""
    weights = (gate_query, gate_bias, pool_query, weight)
    normed, made = _gate_norm[store](*map(list, held), y, *weights, store, competitive, eps)
    return normed, Streams(made.unbind()) if store else held.later(y, made)


def _dense(projected: Tensor) -> Tensor:
    return projected if projected.stride(-1) == 1 else projected.contiguous()
