"""Tensors rounded to FP8 in one pass, with their largest magnitudes; a step's weights also transposed."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.numeric import constant
from residua.ops._runtime.triton_support import supports
from residua.ops.fp8_codes import launch, reference
from residua.ops.low_precision.fp8 import E4M3, EncodedWeight

NOTE = "; its kernels need Ada or Hopper"


def _weights(d: Draw) -> Cases:
    weights = [d.linear(96, 64), d.linear(48, 32), d.linear(96, 64)]
    into = [
        EncodedWeight(w.new_empty(w.shape, dtype=E4M3), w.new_empty(w.shape[::-1], dtype=E4M3), w.new_empty(()))
        for w in weights
    ]
    yield Case((weights, into), gradients=False, in_place=1, note=NOTE)


def _scale(d: Draw) -> Tensor:
    return torch.full((), 2.0**-7, device=d.device)


def _values(d: Draw) -> Cases:
    for gradient in (False, True):
        yield Case((d.x(), _scale(d)), {"gradient": gradient}, f"{gradient=}", gradients=False, note=NOTE)


def _serves_weights(weights: Sequence[Tensor], into: Sequence[EncodedWeight]) -> bool:
    written = [t for encoded in into for t in (encoded.codes, encoded.turned) if t is not None]
    return _serves(*weights) and all(_fits_table(t) for t in (*weights, *written))


def _fits_table(x: Tensor) -> bool:
    """Whether kernels may access a tensor by its address alone."""
    return x.is_contiguous() and x.numel() > 0 and not (x.is_cuda and x.data_ptr() % 16)


def _serves(*tensors: Tensor, **_: Any) -> bool:
    return supports(*tensors) and (not any(x.is_cuda for x in tensors) or _has_fp8())


@constant
def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def _squares(d: Draw) -> Cases:
    yield Case((d.x(), _scale(d)), gradients=False, note=NOTE)


def _slopes(d: Draw) -> Cases:
    yield Case((d.x(), d.x().relu(), _scale(d)), gradients=False, note=NOTE)


encode_weights = Operator(reference.encode_weights, _weights, launch.encode_weights, _serves_weights)
encode_values = Operator(reference.encode_values, _values, launch.encode_values, _serves)
encode_squares = Operator(reference.encode_squares, _squares, launch.encode_squares, _serves)
encode_slopes = Operator(reference.encode_slopes, _slopes, launch.encode_slopes, _serves)

__all__ = ["encode_slopes", "encode_squares", "encode_values", "encode_weights"]
