"""Operators of decoding, which `torch.compile` and CUDA graphs take whole. None has a gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residua.ops._runtime.library import operator
from residua.ops.decode import launch
from residua.ops.mix_projection.reference import Mixing

_add_norm = operator(
    "add_norm_decode(Tensor base, Tensor y, Tensor weight, float eps) -> (Tensor, Tensor)",
    launch.add_norm,
    launch.add_norm_outputs,
)
_read_sources = operator(
    "read_sources(Tensor[] sources, Tensor y, Tensor? base, Tensor queries, Tensor weight, float eps)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch.read_sources,
    launch.read_sources_outputs,
)
_read_partial = operator(
    "read_partial(Tensor o, Tensor lse, Tensor square, Tensor y, Tensor? base, Tensor query, Tensor weight, float eps)"
    " -> (Tensor, Tensor)",
    launch.read_partial,
    launch.read_partial_outputs,
)
_gate_norm = operator(
    "gate_norm(Tensor[] streams, Tensor y, Tensor gate_query, Tensor gate_bias, Tensor pool_query, Tensor weight,"
    " bool competitive, float eps) -> (Tensor, Tensor)",
    launch.gate_norm,
    launch.gate_norm_outputs,
)
_enter_cache = operator(
    "enter_cache(Tensor projected, SymInt heads, Tensor[] gains, Tensor cos, Tensor sin, Tensor(a!) keys,"
    " Tensor(b!) values, Tensor positions, Tensor[] mixing) -> Tensor",
    launch.enter_cache,
    launch.enter_cache_output,
)
_decode_attention = operator(
    "decode_attention(Tensor q, Tensor keys, Tensor values, Tensor until, Tensor? sink) -> Tensor",
    launch.decode_attention,
    launch.decode_attention_output,
)
_activate = operator("activate_decode(Tensor x, str kind) -> Tensor", launch.activate, launch.activate_output)


def add_norm(base: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.add_norm`."""
    normed, h = _add_norm(base.contiguous(), y.contiguous(), weight, eps)
    return normed, h


def read_sources(
    sources: Sequence[Tensor], y: Tensor, base: Tensor | None, queries: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fused twin of `reference.read_sources`."""
    dense, base = [s.contiguous() for s in sources], None if base is None else base.contiguous()
    return _read_sources(dense, y.contiguous(), base, queries, weight, eps)  # type: ignore[no-any-return]


def read_partial(
    finished: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    base: Tensor | None,
    query: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.read_partial`."""
    o, lse, square = (t.contiguous() for t in finished)
    base = None if base is None else base.contiguous()
    normed, p = _read_partial(o, lse, square, y.contiguous(), base, query, weight, eps)
    return normed, p


def gate_norm(
    streams: Sequence[Tensor],
    y: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    weight: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The fused twin of `reference.gate_norm`."""
    queries = (gate_query, gate_bias, pool_query)
    normed, after = _gate_norm([s.contiguous() for s in streams], y.contiguous(), *queries, weight, competitive, eps)
    return normed, after.unbind()


def enter_cache(
    projected: Tensor,
    heads: int,
    gains: tuple[Tensor, Tensor] | None,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    mixing: Mixing | None = None,
) -> Tensor:
    """The fused twin of `reference.enter_cache`."""
    dense = projected if projected.stride(1) == 1 else projected.contiguous()
    tables = (cos.contiguous(), sin.contiguous())
    q: Tensor = _enter_cache(dense, heads, list(gains or ()), *tables, keys, values, positions, list(mixing or ()))
    return q


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, until: Tensor, sink: Tensor | None = None) -> Tensor:
    """The fused twin of `reference.decode_attention`."""
    dense = q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()
    result: Tensor = _decode_attention(dense, keys, values, until, sink)
    return result


def activate(x: Tensor, kind: str) -> Tensor:
    """The fused twin of `reference.activate`."""
    result: Tensor = _activate(x.contiguous(), kind)
    return result
