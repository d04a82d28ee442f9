"""The symmetric product as an operator. It has no gradient: only an optimizer uses it."""

from __future__ import annotations

from torch import Tensor

from residua.ops._runtime.library import operator
from residua.ops.symmetric_product import launch

_symmetric_product = operator(
    "symmetric_product(Tensor x, Tensor? c, float alpha, float beta, float gamma) -> Tensor",
    launch.forward,
    launch.output,
)


def symmetric_product(
    x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """The fused twin of `reference.symmetric_product`."""
    result: Tensor = _symmetric_product(x, c, alpha, beta, gamma)
    return result
