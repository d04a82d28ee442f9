"""One linear map per group of rows: the experts of a mixture."""

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops.grouped_linear import launch, reference

grouped_linear = Operator(reference.grouped_linear)


def _serves(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    return x.is_cuda and launch.takes(x, weight)


grouped_linear.register_fused(launch.grouped_linear, _serves)

__all__ = ["grouped_linear"]
