"""Normalise every head and rotate it by its position, in one operator.

Not measured alone: `residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare "prenorm,prenorm
backend=reference"` times all kernels together. Packed gradients of Q, K and V gained 9 ms of a step of L
(docs/lab/kernels.md, "Gains of single parts").
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.triton_support import supports
from residua.ops.norm_rotate import launch, reference
from residua.ops.norm_rotate.reference import rotate


def _serves(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> bool:
    return supports(x, weight, cos, sin)


norm_rotate = Operator(
    reference.norm_rotate,
    lambda d: [Case((d.heads(), d.w(d.sizes.head_dim), *d.table), fixed=d.table)],
    launch.norm_rotate,
    _serves,
)

__all__ = ["norm_rotate", "rotate"]
