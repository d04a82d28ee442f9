"""Multi-Gate Residuals: gated write into n streams and attention pool, in one operator."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from residua.ops import fused
from residua.ops.backend import Operator
from residua.ops.multi_gate import chain, reference
from residua.ops.multi_gate.reference import gates, pool, pool_weights

MOST_STREAMS = 16


def _fused(*args: Any, **settings: Any) -> Any:
    from residua.ops.multi_gate.triton import multi_gate

    return multi_gate(*args, **settings)


def _fused_chain(*args: Any, **settings: Any) -> Any:
    from residua.ops.multi_gate.triton import multi_gate_chain

    return multi_gate_chain(*args, **settings)


def _serves(streams: Tensor, update: Tensor, *weights: Tensor, **_: Any) -> bool:
    return streams.shape[-2] <= MOST_STREAMS and fused.asked(streams, update, *weights)


def _serves_chain(state: Sequence[Tensor], *rest: Tensor, **_: Any) -> bool:
    return _serves(state[0], *rest)


multi_gate = Operator(reference.multi_gate)
multi_gate.register_fused(_fused, _serves)
multi_gate_chain = Operator(chain.multi_gate_chain)
multi_gate_chain.register_fused(_fused_chain, _serves_chain)

__all__ = ["gates", "multi_gate", "multi_gate_chain", "pool", "pool_weights"]
