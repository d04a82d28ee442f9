"""FP8 codes in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from residua.ops._runtime.numeric import wide
from residua.ops.low_precision.fp8 import E5M2, E5M2_MAX, EncodedWeight, encode, encode_weight, largest_of


def encode_weights(weights: Sequence[Tensor], into: Sequence[EncodedWeight]) -> None:
    """Write each weight [N, K] in FP8, its transpose, and its scale, as `encode_weight` does."""
    for weight, (codes, turned, scale) in zip(weights, into, strict=True):
        new = encode_weight(weight)
        codes.copy_(new.codes)
        scale.copy_(new.scale)
        if turned is not None:
            turned.copy_(new.codes.t())


def encode_values(x: Tensor, scale: Tensor, *, gradient: bool = False) -> tuple[Tensor, Tensor]:
    """The codes of x under a scale, in E4M3, or E5M2 for a gradient, and max|x|."""
    codes = encode(x, scale, E5M2, E5M2_MAX) if gradient else encode(x, scale)
    return codes.values, largest_of(x)


def encode_squares(h: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a = relu(h)², its codes in E4M3 under a scale, and max a."""
    a = h.relu().square()
    return a, *encode_values(a, scale)


def encode_slopes(g: Tensor, a: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p = g ⊙ 2√a, the gradient of h if g is that of a = relu(h)²; its codes in E5M2 under a scale, and max|p|."""
    p = (wide(g) * (2 * wide(a).sqrt())).to(g.dtype)
    return p, *encode_values(p, scale, gradient=True)
