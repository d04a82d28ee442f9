"""Hyper-connections: write into n streams, weigh them, read, in one operator; and Sinkhorn's normalisation."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.hyper_connection import reference
from residua.ops.hyper_connection.reference import Norm, read_weights

MOST_STREAMS = 4
"""What a thread of the kernels can hold. More streams run as plain PyTorch: no preset has them."""


def _serves(
    streams: Tensor, update: Tensor, *weights: Tensor,
    scale: Tensor | None = None, phi: Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    projection = [t for t in (scale, phi) if t is not None]
    return streams.shape[-2] <= MOST_STREAMS and fused.serves(streams, update, *weights, *projection)


def _serves_sinkhorn(logits: Tensor, iterations: int) -> bool:
    return iterations > 0 and logits.shape[-1] <= MOST_STREAMS and fused.serves(logits)


def _serves_weights(logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int) -> bool:
    return iterations > 0 and streams <= MOST_STREAMS and fused.serves(logits, scale, bias)


hyper_step = Operator(reference.hyper_step)
manifold_weights = Operator(reference.manifold_weights)
sinkhorn = Operator(reference.sinkhorn)

if fused.INSTALLED:
    from residua.ops.hyper_connection import autograd

    hyper_step.register_fused(autograd.hyper_step, _serves)
    manifold_weights.register_fused(autograd.manifold_weights, _serves_weights)
    sinkhorn.register_fused(autograd.sinkhorn, _serves_sinkhorn)

__all__ = ["Norm", "hyper_step", "manifold_weights", "read_weights", "sinkhorn"]
