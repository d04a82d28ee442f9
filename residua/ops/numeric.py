"""Small pieces of arithmetic that several reference operators share."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: half-precision tensors are reduced in single precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms(x: Tensor, eps: float = 1e-6, weight: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) over the last axis, times the gain if there is one; in x's own dtype."""
    w = wide(x)
    y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)
