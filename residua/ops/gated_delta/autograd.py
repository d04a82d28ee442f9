"""The gated delta rule, fused: operators and gradients. As two opaque operators, `torch.compile` sees one graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from residua.ops._runtime.library import differentiate, operator
from residua.ops.gated_delta import library
from residua.ops.gated_delta.reference import begins, check_shapes, initial_state

# A document's first token fades the state by e^−40, below float32's rounding of anything it is added to. Minus infinity
# would do it exactly and turn the kernels' differences of cumulative sums into NaN.
FORGET = -40.0

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state"
_forward = operator(
    f"gated_delta({_INPUTS}) -> (Tensor, Tensor)", library.forward, library.forward_outputs, ahead=False
)
_backward = operator(
    f"gated_delta_backward(Tensor d_o, Tensor d_last, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    library.backward,
    library.backward_outputs,
    ahead=False,
)


def gated_delta(
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
    check_shapes(q, k, v, g, beta)
    q, k, g, beta = q.to(v.dtype), k.to(v.dtype), g.float(), beta.float()
    if segments is not None:
        g = g.masked_fill(begins(v, segments)[..., None], FORGET)
    o, last = _forward(q, k, v, g, beta, initial_state(k, v, state))
    return o, last


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, d_o: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = _backward(d_o, d_last, *ctx.saved_tensors)
    return gradients


differentiate(_forward, _differentiate, _save)
