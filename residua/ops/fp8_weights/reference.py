"""Weights in FP8 in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residua.ops.low_precision.product import EncodedWeight, encode_weight


def encode_weights(weights: Sequence[Tensor], into: Sequence[EncodedWeight]) -> None:
    """Write each weight [N, K] in FP8, its transpose, and its scale, as `encode_weight` does."""
    for weight, (codes, turned, scale) in zip(weights, into, strict=True):
        new = encode_weight(weight)
        codes.copy_(new.codes)
        scale.copy_(new.scale)
        if turned is not None:
            turned.copy_(new.codes.t())
