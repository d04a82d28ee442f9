"""QK-norm and rotation, fused: operators and gradients. The inputs are all that is kept for the backward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residua.ops._runtime.library import differentiate, operator
from residua.ops.norm_rotate import launch

_forward = operator(
    "norm_rotate(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
    launch.forward,
    launch.forward_output,
)
_backward = operator(
    "norm_rotate_backward(Tensor dy, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
    launch.backward,
    launch.backward_outputs,
)
packed_heads_backward = operator(
    "packed_heads_backward(Tensor dq, Tensor dk, Tensor dv, Tensor q, Tensor k, Tensor query, Tensor key, "
    "Tensor cos, Tensor sin, float query_eps, float key_eps) -> (Tensor, Tensor, Tensor)",
    launch.packed_backward,
    launch.packed_outputs,
)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.norm_rotate`."""
    result: Tensor = _forward(x, weight, cos, sin, eps)
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = _backward(dy, *ctx.saved_tensors, ctx.eps)
    return dx, dweight, None, None, None


differentiate(_forward, _differentiate, _save)
