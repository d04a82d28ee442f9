"""Whole sequences without gradients: a junction and its norm in one launch, heads straight into the cache."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.mix_projection.reference import Mixing
from residua.ops.prefill import reference
from residua.ops.prefill.reference import Queries, Streams

MOST_STREAMS = 16

turn_heads = Operator(reference.turn_heads)
enter_heads = Operator(reference.enter_heads)
source_scores = Operator(reference.source_scores)
read_group = Operator(reference.read_group)
read_norm = Operator(reference.read_norm)
gate_norm = Operator(reference.gate_norm)


def _alike(*tensors: Tensor) -> bool:
    return all(t.dtype == tensors[0].dtype for t in tensors) and fused.serves(*tensors)


def _serves_heads(projected: Tensor, heads: int, kv_heads: int, gains: Any, cos: Tensor, *_: Any, **__: Any) -> bool:
    return cos.dim() == 2 and fused.serves(projected, cos)


def _serves_entry(
    projected: Tensor, heads: int, gains: Any, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    mixing: Mixing | None = None, **_: Any,
) -> bool:  # fmt: skip
    dense = keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[-1], 1)
    anchors = () if mixing is None else (mixing.anchor,)
    dense = dense and all(anchor.stride()[2:] == (keys.shape[-1], 1) for anchor in anchors)
    return dense and cos.dim() == 2 and fused.serves(cos) and _alike(projected, keys, values, *anchors)


def _serves_scores(y: Tensor, base: Tensor | None, *_: Any) -> bool:
    return _alike(y, *(() if base is None else (base,)))


def _serves_group(sources: Any, *_: Any) -> bool:
    return _alike(*sources)


def _serves_read(others: Any, scores: Any, rows: Any, y: Tensor, base: Tensor | None, *_: Any, **__: Any) -> bool:
    return _alike(y, *others, *(() if base is None else (base,)))


def _serves_gate(held: Streams, y: Tensor, *_: Any, **__: Any) -> bool:
    return len(held.stored) <= MOST_STREAMS and _alike(y, *held.stored, *held.updates)


if fused.INSTALLED:
    from residua.ops.prefill import autograd

    turn_heads.register_fused(autograd.turn_heads, _serves_heads)
    enter_heads.register_fused(autograd.enter_heads, _serves_entry)
    source_scores.register_fused(autograd.source_scores, _serves_scores)
    read_group.register_fused(autograd.read_group, _serves_group)
    read_norm.register_fused(autograd.read_norm, _serves_read)
    gate_norm.register_fused(autograd.gate_norm, _serves_gate)

__all__ = ["Queries", "Streams", "enter_heads", "gate_norm", "read_group", "read_norm", "source_scores", "turn_heads"]
