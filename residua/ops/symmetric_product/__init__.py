"""Products of a stack of matrices with their own transposes, computing half of each symmetric result.

Polar Express on 144 matrices of 1280×1280 takes 12.0 ms, with whole products 16.0. A step of L became 8 ms shorter
(docs/lab/kernels.md, "Steps", `residua bench step mgr-l-prenorm --micro-batch 16 --accumulate 4`).
"""

from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator, chosen_backend
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import HOPPER_SHARED_MEMORY, shared_memory, supports
from residua.ops.symmetric_product import launch, reference

SMALLEST = 512
"""From this many rows on, half the tiles are faster than cuBLAS with all tiles."""
SHARED_BYTES = HOPPER_SHARED_MEMORY
"""Shared memory that the tiles need; compute capabilities 9.0 and 10.0 have it."""


def _serves(x: Tensor, c: Tensor | None = None, **_: Any) -> bool:
    if not supports(x) or x.shape[2] == 0 or (x.requires_grad and torch.is_grad_enabled()):
        return False
    return chosen_backend() == "triton" or (x.dtype == torch.bfloat16 and x.shape[1] >= SMALLEST)


def _cases(d: Draw) -> Cases:
    yield Case((d.matrix(2, SMALLEST, d.sizes.width),), gradients=False, note="; its kernel needs Hopper or Blackwell")


def _fused(x: Tensor, *args: Any, **settings: Any) -> Tensor:
    run = launch.symmetric_product if shared_memory(x) >= SHARED_BYTES else reference.symmetric_product
    return run(x, *args, **settings)


symmetric_product = Operator(reference.symmetric_product, _cases, _fused, _serves)

__all__ = ["symmetric_product"]
