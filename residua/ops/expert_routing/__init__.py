"""Which experts each token visits, with which weights, and the order of its slots."""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.expert_routing import launch, reference
from residua.ops.expert_routing.reference import Routed

MOST_EXPERTS, MOST_CHOICES = 256, 8
"""More scores would not fit into a program's registers."""


def _serves(
    x: Tensor, weight: Tensor, top_k: int, *, groups: object = None, offset: Tensor | None = None, **_: Any
) -> bool:
    few = len(weight) <= MOST_EXPERTS and top_k <= MOST_CHOICES
    return len(x) > 0 and few and groups is None and offset is None and supports(x, weight)


def _cases(d: Draw) -> Cases:
    yield Case((d.x(), d.linear(d.sizes.experts, d.sizes.width), d.sizes.top_k), moved=(1, 2))


route = Operator(reference.route, _cases, launch.route, _serves, compile_seconds=4)

__all__ = ["Routed", "route"]
