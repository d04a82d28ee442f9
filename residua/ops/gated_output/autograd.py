"""Output norm and gate, fused: operators and gradients. Kept for backward: the inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residua.ops._runtime.library import differentiate, operator
from residua.ops.gated_output import launch

_INPUTS = "Tensor o, Tensor z, Tensor weight, float eps"
_forward = operator(f"gated_output({_INPUTS}) -> Tensor", launch.forward, launch.forward_outputs)
_backward = operator(
    f"gated_output_backward(Tensor dy, {_INPUTS}) -> (Tensor, Tensor, Tensor)", launch.backward, launch.backward_outputs
)


def gated_output(o: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """The fused twin of `reference.gated_output`."""
    y: Tensor = _forward(o, z, weight, eps)
    return y


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    o, z, weight = ctx.saved_tensors
    d_o, d_z, d_weight = _backward(dy, o, z, weight, ctx.eps)
    return d_o, d_z, d_weight.to(weight.dtype), None


differentiate(_forward, _differentiate, _save)
