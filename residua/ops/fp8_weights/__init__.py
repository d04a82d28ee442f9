"""Weights rounded to FP8 for a step of training, with their transposes, many at once and in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.numeric import constant
from residua.ops._runtime.triton_support import INSTALLED, supports
from residua.ops.fp8_weights import reference
from residua.ops.low_precision.fp8 import E4M3
from residua.ops.low_precision.product import EncodedWeight


def _cases(d: Draw) -> Cases:
    weights = [d.linear(96, 64), d.linear(48, 32), d.linear(96, 64)]
    into = [
        EncodedWeight(w.new_empty(w.shape, dtype=E4M3), w.new_empty(w.shape[::-1], dtype=E4M3), w.new_empty(()))
        for w in weights
    ]
    yield Case((weights, into), gradients=False, in_place=1, note="; its kernels need Ada or Hopper")


encode_weights = Operator(reference.encode_weights, _cases)

if INSTALLED:
    from residua.ops.fp8_weights import launch

    def _serves(weights: Sequence[Tensor], *_: Any) -> bool:
        fits = all(w.is_contiguous() and w.numel() and not (w.is_cuda and w.data_ptr() % 16) for w in weights)
        return fits and supports(*weights) and (not any(w.is_cuda for w in weights) or _has_fp8())

    @constant
    def _has_fp8() -> bool:
        return torch.cuda.get_device_capability() >= (8, 9)

    encode_weights.register_fused(launch.encode_weights, _serves)

__all__ = ["encode_weights"]
