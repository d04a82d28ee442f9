"""The delta rule with a decay per channel, fused where it costs most: the products of decayed keys and queries.

As two opaque operators, `torch.compile` sees one graph. Backward keeps their inputs and forms the decays again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residua.ops._runtime.library import differentiate, operator
from residua.ops.kimi_delta import launch
from residua.ops.kimi_delta.reference import in_chunks

_INPUTS = "Tensor k, Tensor q, Tensor total"
_forward = operator(f"decayed_products({_INPUTS}) -> (Tensor, Tensor)", launch.forward, launch.forward_outputs)
_backward = operator(
    f"decayed_products_backward(Tensor d_keys, Tensor d_queries, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)


def kimi_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    segments: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.chunked`."""
    return in_chunks(_products, q, k, v, g, beta, segments, state)


def _products(k: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    of_keys, of_queries = _forward(k.contiguous(), q.contiguous(), total.contiguous())
    return of_keys, of_queries


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_keys: Tensor, d_queries: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(d_keys, d_queries, *ctx.saved_tensors)
    return gradients


differentiate(_forward, _differentiate, _save)
