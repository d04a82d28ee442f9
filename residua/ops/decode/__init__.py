"""Decoding one token per row: a junction and its norm in one launch, and attention to a cache."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.decode import autograd, launch, reference
from residua.ops.mix_projection.reference import Mixing

MOST_STREAMS = 16
WIDEST = 8192
WIDEST_HEAD = 256

add_norm = Operator(reference.add_norm)
read_sources = Operator(reference.read_sources)
read_partial = Operator(reference.read_partial)
gate_norm = Operator(reference.gate_norm)
enter_cache = Operator(reference.enter_cache)
decode_attention = Operator(reference.decode_attention)
activate = Operator(reference.activate)


def _rows(*tensors: Tensor) -> bool:
    """Rows that a program can hold, all of one dtype."""
    first = tensors[0]
    alike = all(t.dtype == first.dtype and t.shape[-1] == first.shape[-1] for t in tensors)
    return alike and first.shape[-1] <= WIDEST and fused.serves(*tensors)


def _serves_add(base: Tensor, y: Tensor, weight: Tensor, **_: Any) -> bool:
    return _rows(base, y)


def _serves_sources(sources: Any, y: Tensor, base: Tensor | None, *_: Any, **__: Any) -> bool:
    return len(sources) <= launch.MOST_SOURCES and _rows(*sources, y, *(() if base is None else (base,)))


def _serves_partial(finished: Any, y: Tensor, base: Tensor | None, *_: Any, **__: Any) -> bool:
    return _rows(y, *(() if base is None else (base,))) and fused.serves(*finished)


def _serves_gate(streams: Any, y: Tensor, *_: Any, **__: Any) -> bool:
    return len(streams) <= MOST_STREAMS and _rows(*streams, y)


def _serves_entry(
    projected: Tensor, heads: int, gains: Any, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, _: Tensor,
    mixing: Mixing | None = None,
) -> bool:  # fmt: skip
    alike = keys.stride() == values.stride() and keys.stride(-1) == 1 and keys.shape[-1] % 2 == 0
    anchors = () if mixing is None else (mixing.anchor,)
    alike = alike and all(anchor.stride()[1:] == (keys.shape[-1], 1) for anchor in anchors)
    return alike and fused.serves(projected, cos, sin, keys, values, *anchors)


def _serves_attention(q: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> bool:
    alike = keys.shape == values.shape and keys.stride() == values.stride() and keys.stride(-1) == 1
    return alike and q.shape[-1] <= WIDEST_HEAD and fused.serves(q, keys, values)


def _serves_activation(x: Tensor, kind: str) -> bool:
    return fused.serves(x)


if fused.INSTALLED:
    add_norm.register_fused(autograd.add_norm, _serves_add)
    read_sources.register_fused(autograd.read_sources, _serves_sources)
    read_partial.register_fused(autograd.read_partial, _serves_partial)
    gate_norm.register_fused(autograd.gate_norm, _serves_gate)
    enter_cache.register_fused(autograd.enter_cache, _serves_entry)
    decode_attention.register_fused(autograd.decode_attention, _serves_attention)
    activate.register_fused(autograd.activate, _serves_activation)

__all__ = [
    "activate",
    "add_norm",
    "decode_attention",
    "enter_cache",
    "gate_norm",
    "read_partial",
    "read_sources",
]
