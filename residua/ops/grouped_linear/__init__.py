"""One linear map per group of rows, such as the experts of a mixture. The fused path is PyTorch's grouped product.

That is one kernel for all groups, which reads their sizes from GPU memory.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.numeric import working_dtype
from residua.ops.grouped_linear import reference

ALIGNED = 8  # bfloat16 values in 16 bytes: rows of every operand must start on such a boundary


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product supports these: bfloat16, possibly by autocast, and rows of a multiple of 16 bytes."""
    return working_dtype(x) is torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:])


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The fused twin of `reference.grouped_linear`."""
    dtype = working_dtype(x)
    y: Tensor = grouped_mm(x.to(dtype), weight.to(dtype).mT, offs=ends.to(torch.int32))
    return y


def _serves(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    return x.is_cuda and takes(x, weight)


grouped_linear = Operator(
    reference.grouped_linear,
    lambda d: [Case((d.x(), d.matrix(3, d.sizes.width, d.sizes.width), d.thirds()))],
    grouped_product,
    _serves,
)

__all__ = ["grouped_linear", "grouped_product", "takes"]
