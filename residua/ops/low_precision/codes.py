"""Tensors as FP8 codes under one scale, for products that train (`product.py` has the mathematics)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops.low_precision.fp8 import E4M3, E4M3_MAX, EMPTY_SCALE

E5M2 = torch.float8_e5m2
E5M2_MAX = 57_344.0


class Codes(NamedTuple):
    """x ≈ values · scale, with `values` in FP8 and a `scale` in fp32."""

    values: Tensor
    scale: Tensor


class EncodedWeight(NamedTuple):
    """W ≈ codes · scale: codes [N, K], and `turned` [K, N], their transpose, for dx; None if it is made there."""

    codes: Tensor
    turned: Tensor | None
    scale: Tensor


class Scales(NamedTuple):
    """Scalars of one product: the scales of x and of g, and the largest magnitudes seen of both."""

    x: Tensor
    g: Tensor
    seen_x: Tensor
    seen_g: Tensor


def scale_of(largest: Tensor, limit: float = E4M3_MAX) -> Tensor:
    """The least power of two by which `largest` is divided to at most `limit`; not finite if `largest` is not."""
    share = largest.float() / limit
    above = ((share.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # what is past its exponent carries
    return torch.where(share.isfinite(), torch.where(above == 0, EMPTY_SCALE, above), share)


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3, limit: float = E4M3_MAX) -> Codes:
    """x in FP8 under a scale; larger values than it admits are clamped."""
    return Codes((x.float() * scale.reciprocal()).clamp(-limit, limit).to(dtype), scale)


def largest_of(x: Tensor) -> Tensor:
    """max|x| in fp32, 0 of no values."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def encode_weight(weight: Tensor) -> EncodedWeight:
    """A weight [N, K] under the scale of its own values."""
    codes, scale = encode(weight.detach(), scale_of(largest_of(weight)))
    return EncodedWeight(codes, None, scale)
