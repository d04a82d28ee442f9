"""Gated DeltaNet between its projections: the launches of three operators, on tensors that they share.

Apart, the gate's gradient would be copied beside those of q, k and v, and the gradients of a key head, one for each
value head that it serves, would be added in a pass of their own.
"""

from __future__ import annotations

from torch import Tensor

from residua.ops.gated_delta import launch as rule
from residua.ops.gated_output import launch as output
from residua.ops.short_convolution import launch as heads

NORM_EPS = 1e-6


def forward_outputs(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    key_heads: int, eps: float, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    made = heads.forward_outputs(projected, convolution, begins, key_heads, g.shape[-1], NORM_EPS)
    o, last, *kept = rule.forward_outputs(*made, g, beta, begins, None, keep)
    return o.new_empty(o.shape), last, *made, o, *kept


def forward(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    key_heads: int, eps: float, keep: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """y and the last state; then what backward needs: q, k, v, o and what the delta rule keeps."""
    made: tuple[Tensor, Tensor, Tensor] = heads.forward(
        projected, convolution, begins, key_heads, g.shape[-1], NORM_EPS
    )
    o, last, *kept = rule.forward(*made, g, beta, begins, None, keep)
    z = projected[..., convolution.shape[1] :].unflatten(-1, o.shape[2:])
    return output.forward(o, z, gain, eps), last, *made, o, *kept


def backward_outputs(
    dy: Tensor, d_last: Tensor | None, projected: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, inverse: Tensor, reads: Tensor, rates: Tensor, states: Tensor,
    u: Tensor, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    gate = rates.new_empty(v.shape[:3])
    weights = (rates.new_empty(w.shape) for w in (convolution, gain))
    return projected.new_empty(projected.shape), gate, rates.new_empty(v.shape[:3]), *weights


def backward(
    dy: Tensor, d_last: Tensor | None, projected: Tensor, convolution: Tensor, gain: Tensor, begins: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, inverse: Tensor, reads: Tensor, rates: Tensor, states: Tensor,
    u: Tensor, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of the projection, g, beta, the convolution and the gain."""
    d_projected, _, _, d_convolution, d_gain = backward_outputs(
        dy, d_last, projected, convolution, gain, begins, q, k, v, o, inverse, reads, rates, states, u, eps
    )
    d_o = o.new_empty(o.shape)
    z, d_z = (x[..., convolution.shape[1] :].unflatten(-1, o.shape[2:]) for x in (projected, d_projected))
    output.launch_backward(dy, o, z, gain, eps, d_o, d_z, d_gain)
    dq, dk, dv, dg, dbeta, _ = rule.backward(d_o, d_last, q, k, v, inverse, reads, rates, states, u, False)
    heads.launch_backward(dq, dk, dv, projected, convolution, begins, NORM_EPS, k.shape[2], d_projected, d_convolution)
    return d_projected, dg, dbeta, d_convolution, d_gain
