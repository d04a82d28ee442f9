"""Hyper-connections: write into n streams, weight them and read them in one operator; and Sinkhorn's normalisation."""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.hyper_connection import autograd, reference
from residua.ops.hyper_connection.reference import Norm, read_weights

MOST_STREAMS = 4
"""The most streams that a kernel's thread can hold. More run as plain PyTorch; no preset has more."""


def _serves(
    streams: Tensor, update: Tensor, *weights: Tensor,
    scale: Tensor | None = None, phi: Tensor | None = None, **_: Any,
) -> bool:  # fmt: skip
    projection = [t for t in (scale, phi) if t is not None]
    return streams.shape[-2] <= MOST_STREAMS and supports(streams, update, *weights, *projection)


def _serves_single_pass(streams: Tensor, *tensors: Tensor, **_: Any) -> bool:
    return streams.shape[-2] <= MOST_STREAMS and supports(streams, *tensors)


def _serves_sinkhorn(logits: Tensor, iterations: int) -> bool:
    return iterations > 0 and logits.shape[-1] <= MOST_STREAMS and supports(logits)


def _serves_weights(logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int) -> bool:
    return iterations > 0 and streams <= MOST_STREAMS and supports(logits, scale, bias)


def _steps(d: Draw) -> Cases:
    tokens, width, n = d.sizes.tokens, d.sizes.width, d.sizes.streams
    weights = (d.w(tokens, n).softmax(-1), d.w(tokens, n, n).softmax(-1), d.w(n))
    projection = {"scale": d.w(), "phi": d.linear(n * (n + 2), n * width), "norm": "all"}
    yield Case((d.x(tokens, n, width), d.x(), *weights), projection)


def _single_pass_steps(d: Draw) -> Cases:
    tokens, width, n = d.sizes.tokens, d.sizes.width, d.sizes.streams
    weights = (d.w(tokens, n).softmax(-1), d.w(tokens, n, n).softmax(-1), d.w(tokens, n).softmax(-1))
    yield Case((d.x(tokens, n, width), d.x(), *weights, d.linear(n + 2, width)))


def _manifold_weights(d: Draw) -> Cases:
    n = d.sizes.streams
    yield Case((d.w(d.sizes.tokens, n * (n + 2)), d.w(3), d.w(n * (n + 2)), n, 20))


def _squares(d: Draw) -> Cases:
    yield Case((d.w(d.sizes.tokens, d.sizes.streams, d.sizes.streams), 20))


hyper_step = Operator(reference.hyper_step, _steps, autograd.hyper_step, _serves, compile_seconds=5)
single_pass_step = Operator(
    reference.single_pass_step, _single_pass_steps, autograd.single_pass_step, _serves_single_pass, compile_seconds=5
)
manifold_weights = Operator(reference.manifold_weights, _manifold_weights, autograd.manifold_weights, _serves_weights)
sinkhorn = Operator(reference.sinkhorn, _squares, autograd.sinkhorn, _serves_sinkhorn)

__all__ = ["Norm", "hyper_step", "manifold_weights", "read_weights", "single_pass_step", "sinkhorn"]
