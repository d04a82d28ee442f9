"""The feed-forwards of a mixture's experts, each applied to its rows or to the tokens that visit it."""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.triton_support import DTYPES, supports
from residua.ops.expert_ffn import launch, reference
from residua.ops.expert_ffn.reference import expert_hidden
from residua.ops.expert_routing import route

ALIGNMENT = 8
"""Rows are read 16 bytes at a time: this many elements in bfloat16."""


def _serves(
    x: Tensor, up: Tensor, out: Tensor, ends: Tensor, activation: str, *, up_bias: Tensor | None = None, **_: Any
) -> bool:
    if up_bias is not None or activation == "clamped_swiglu":
        return False
    whole = all(size % ALIGNMENT == 0 for size in out.shape[1:])
    return whole and len(x) > 0 and working_dtype(x) in DTYPES and supports(x, up, out)


def _cases(d: Draw) -> Cases:
    """Rows already sorted, then tokens routed at random to experts as wide as the model."""
    width, experts = d.sizes.width, d.sizes.experts
    yield Case((d.x(), d.matrix(3, 2 * width, width), d.matrix(3, width, width), d.thirds(), "swiglu"))
    routed = route.reference(d.x(), d.linear(experts, width), d.sizes.top_k)
    for activation in ("relu2", "swiglu"):
        up = d.matrix(experts, width * (2 if activation in reference.GATED else 1), width)
        args = (d.x(), up, d.matrix(experts, width, width), routed.ends, activation)
        yield Case(args, {"order": routed.order, "weights": routed.weights.detach()}, f"routed, {activation}")


expert_ffn = Operator(reference.expert_ffn, _cases, launch.expert_ffn, _serves, compile_seconds=7)

__all__ = ["expert_ffn", "expert_hidden"]
