"""Grouped linear maps by PyTorch's grouped matrix product: one kernel for all groups, with their sizes on the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.numeric import working_dtype

# torch.nn.functional.grouped_mm since 2.10; the same product was private before
_product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
ALIGNED = 8  # bfloat16 values in 16 bytes: rows of every operand must start on such a boundary


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the product takes these: bfloat16, also by autocast, and rows of a multiple of 16 bytes."""
    return working_dtype(x) is torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape[1:])


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The fused twin of `reference.grouped_linear`."""
    dtype = working_dtype(x)
    y: Tensor = _product(x.to(dtype), weight.to(dtype).mT, offs=ends.to(torch.int32))
    return y
