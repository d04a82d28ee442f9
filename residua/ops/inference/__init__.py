"""Inference without gradients: junction and norm in one launch, heads written straight to the cache, attention to it.

The same operators serve prompts, and decoding of one token per row with a launch per operation. (`whole_layers` decodes
one or two rows in a single launch.)

Prompts of 8×1,024 tokens took 36.6 ms at S before these operators and their CUDA graphs, and take 3.8 with both
(docs/lab/goals.md, `residua bench prefill mgr-s-prenorm --batch 8 --length 1024 --no-peers --rounds 15`). The operators
are not measured alone.
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.inference import launch, reference
from residua.ops.inference.reference import Queries, Streams
from residua.ops.mix_projection.reference import Mixing

MOST_SOURCES = 128
"""The most sources that one launch of `read_sources` supports."""
MOST_STREAMS = 16
WIDEST = 8192
WIDEST_HEAD = 256

ROWS, SLOTS = 5, 40
"""Tokens and cache slots of the examples."""


def _case(*args: Any, **settings: Any) -> Case:
    return Case(args, gradients=False, **settings)


def _row(d: Draw) -> Tensor:
    return d.x(ROWS, d.sizes.width)


def _scores(d: Draw) -> Tensor:
    """The scores of one source for two readers, padded like the kernels' results."""
    return d.w(2, 16)


def _cache(d: Draw) -> tuple[Tensor, Tensor]:
    shape = (ROWS, SLOTS, d.sizes.heads, d.sizes.head_dim)
    return d.x(*shape), d.x(*shape)


def _heads(d: Draw) -> tuple[Tensor, int]:
    """A projection [Q | K | V] of one token per row, and how many heads each part has."""
    return d.x(ROWS, 1, 3 * d.sizes.width), d.sizes.heads


def _gains(d: Draw) -> tuple[Tensor, Tensor]:
    return d.w(d.sizes.head_dim), d.w(d.sizes.head_dim)


def _table(d: Draw) -> tuple[Tensor, Tensor]:
    angles = d.w(SLOTS, d.sizes.head_dim // 2)
    return angles.cos(), angles.sin()


def _reads(d: Draw) -> Cases:
    sources = [_row(d) for _ in range(d.sizes.streams)]
    yield _case(sources, _row(d), None, d.w(3, d.sizes.width, scale=0.1), d.gain())


def _merges(d: Draw) -> Cases:
    o = d.w(ROWS, d.sizes.width)
    yield _case((o, d.w(ROWS), o.square().sum(-1)), _row(d), None, d.w(d.sizes.width, scale=0.1), d.gain())


def _gates(d: Draw) -> Cases:
    streams = Streams(tuple(_row(d) for _ in range(d.sizes.streams)))
    for store in (True, False):
        args = (streams, _row(d), d.gain(), d.w(d.sizes.streams + 1), d.gain(), d.gain())
        yield Case(args, {"store": store}, "" if store else "noted", gradients=False)


def _turns(d: Draw) -> Cases:
    (projected, heads), (cos, sin) = _heads(d), _table(d)
    yield _case(projected, heads, heads, _gains(d), cos[:1], sin[:1])


def _entries(d: Draw) -> Cases:
    yield _case(*_heads(d), _gains(d), *_table(d), *_cache(d), d.below(SLOTS, ROWS), in_place=5)


def _attention(d: Draw) -> Cases:
    yield _case(d.x(ROWS, 2 * d.sizes.heads, d.sizes.head_dim), *_cache(d), d.below(SLOTS, ROWS))


def _alike(*tensors: Tensor | None) -> bool:
    """Whether the tensors, ignoring None, have one dtype and kernels support them."""
    present = [t for t in tensors if t is not None]
    return all(t.dtype == present[0].dtype for t in present) and supports(*present)


def _rows(*tensors: Tensor | None) -> bool:
    """Whether a program can hold the rows, all of one dtype and width."""
    widths = {t.shape[-1] for t in tensors if t is not None}
    return len(widths) == 1 and max(widths) <= WIDEST and _alike(*tensors)


def _serves_gate(state: Streams, y: Tensor, *_: Any, store: bool = True, **__: Any) -> bool:
    fits = _rows if store and not state.updates else _alike
    return len(state.stored) <= MOST_STREAMS and fits(*state.stored, *state.updates, y)


def _serves_entry(
    projected: Tensor, heads: int, gains: Any, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    positions: Tensor | None = None, mixing: Mixing | None = None, **_: Any,
) -> bool:  # fmt: skip
    width, anchors = keys.shape[-1], () if mixing is None else (mixing.anchor,)
    dense = keys.stride() == values.stride() and keys.stride(3) == 1 and width % 2 == 0 and cos.dim() == 2
    dense = dense and all(anchor.stride()[2:] == (width, 1) for anchor in anchors)
    if positions is None:  # kernels store tiles of several heads as computed, so heads must be adjacent
        dense = dense and keys.stride(2) == width and _alike(projected, keys, *anchors)
    return dense and supports(projected, cos, sin, keys, values, *anchors)


def _serves_attention(q: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> bool:
    alike = keys.shape == values.shape and keys.stride() == values.stride() and keys.stride(-1) == 1
    return alike and q.shape[-1] <= WIDEST_HEAD and supports(q, keys, values)


add_norm = Operator(
    reference.add_norm,
    lambda d: [_case(_row(d), _row(d), d.gain())],
    launch.add_norm,
    lambda base, y, weight, **_: _rows(base, y),
)
read_sources = Operator(
    reference.read_sources,
    _reads,
    launch.read_sources,
    lambda sources, y, base, *_, **__: len(sources) <= MOST_SOURCES and _rows(*sources, y, base),
)
read_partial = Operator(
    reference.read_partial,
    _merges,
    launch.read_partial,
    lambda finished, y, base, *_, **__: _rows(y, base) and supports(*finished),
)
source_scores = Operator(  # scores are padded to a multiple of 16 tokens
    reference.source_scores,
    lambda d: [_case(_row(d), None, Queries.of(d.w(3, d.sizes.width, scale=0.1)), 0, 3, only=1)],
    launch.source_scores,
    lambda y, base, *_: _alike(y, base),
)
read_group = Operator(
    reference.read_group,
    lambda d: [_case([_row(d), _row(d)], [_scores(d), _scores(d)], [0, 0], 2, only=1)],
    launch.read_group,
    lambda sources, *_: _alike(*sources),
)
read_norm = Operator(
    reference.read_norm,
    lambda d: [_case([_row(d)], [_scores(d)], [1], _row(d), None, d.gain(), d.gain())],
    launch.read_norm,
    lambda others, scores, rows, y, base, *_, **__: _alike(y, *others, base),
)
gate_norm = Operator(reference.gate_norm, _gates, launch.gate_norm, _serves_gate)
turn_heads = Operator(
    reference.turn_heads,
    _turns,
    launch.turn_heads,
    lambda projected, heads, kv_heads, gains, cos, *_, **__: cos.dim() == 2 and supports(projected, cos),
)
enter_cache = Operator(reference.enter_cache, _entries, launch.enter_cache, _serves_entry)
decode_attention = Operator(reference.decode_attention, _attention, launch.decode_attention, _serves_attention)
activate = Operator(
    reference.activate, lambda d: [_case(_row(d), "swiglu")], launch.activate, lambda x, kind: supports(x)
)

__all__ = [
    "Queries",
    "Streams",
    "activate",
    "add_norm",
    "decode_attention",
    "enter_cache",
    "gate_norm",
    "read_group",
    "read_norm",
    "read_partial",
    "read_sources",
    "source_scores",
    "turn_heads",
]
