"""Multi-Gate Residuals: gated write into n streams and attention pooling, in one operator."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.multi_gate import autograd, inversion, reference
from residua.ops.multi_gate.reference import gates, pool, pool_weights

MOST_STREAMS = 16


def _serves(streams: Tensor, update: Tensor, *weights: Tensor, **_: Any) -> bool:
    return streams.shape[-2] <= MOST_STREAMS and supports(streams, update, *weights)


def _serves_chain(state: Sequence[Tensor], update: Tensor, *weights: Tensor, **_: Any) -> bool:
    streams, _past = reference.split(state, update)
    if len(streams) > 1 and not _alike(streams):
        return False
    return reference.shape(streams)[-2] <= MOST_STREAMS and supports(streams[0], update, *weights)


def _serves_pool(streams: Sequence[Tensor], query: Tensor, **_: Any) -> bool:
    return 1 < len(streams) <= MOST_STREAMS and _alike(streams) and supports(streams[0], query)


def _alike(streams: Sequence[Tensor]) -> bool:
    first = streams[0]
    return all(s.shape == first.shape and s.dtype == first.dtype and s.device == first.device for s in streams)


def _junction(d: Draw) -> tuple[Tensor, ...]:
    """The streams, an update, the gates' query and biases, and the pool's query."""
    streams = d.x(d.sizes.tokens, d.sizes.streams, d.sizes.width)
    return streams, d.x(), d.gain(), d.w(d.sizes.streams + 1), d.gain()


def _chain(d: Draw, **settings: bool) -> Case:
    streams, *rest = _junction(d)
    return Case(([streams], *rest), settings, only=0)


multi_gate = Operator(
    reference.multi_gate,
    lambda d: [Case(_junction(d), moved=(2 * d.sizes.streams + 2, 3 * d.sizes.streams + 3))],
    autograd.multi_gate,
    _serves,
    compile_seconds=5,
)
multi_gate_chain = Operator(reference.multi_gate_chain, lambda d: [_chain(d)], autograd.multi_gate_chain, _serves_chain)
multi_gate_inverted = Operator(
    inversion.multi_gate_inverted, lambda d: [_chain(d, last=True)], autograd.multi_gate_inverted, _serves_chain
)
pool_streams = Operator(
    reference.pool_streams,
    lambda d: [Case(([d.x() for _ in range(d.sizes.streams)], d.gain()), only=0)],
    autograd.pool_streams,
    _serves_pool,
)

__all__ = ["gates", "multi_gate", "multi_gate_chain", "multi_gate_inverted", "pool", "pool_streams", "pool_weights"]
