"""FP8: E4M3 values under one fp32 scale per block, exactly as the hardware and compressed-tensors define them.

    scale = max|x| / 448 over the block (2⁻²³ for a block of zeros),   code = E4M3(clamp(x / scale, ±448))
    x̂ = code · scale

All arithmetic is in fp32, rounding is to nearest, ties to even; bits are the same on CPU and GPU. The block is a tile
of a matrix [R, C]: 128 × 128 for weights, a whole row for activations (one scale per token) and for row-wise weights,
1 × 128 for grouped activations. `Codes` and the code below it serve training, with one scale per tensor
(`product.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E5M2 = torch.float8_e5m2
E5M2_MAX = 57_344.0
EMPTY_SCALE = torch.finfo(torch.float32).eps
"""The scale of a block whose scale would be zero, as in compressed-tensors."""


class Tile(NamedTuple):
    """The part of a matrix that shares a scale; None is the whole axis."""

    rows: int | None
    columns: int | None


BLOCK = Tile(128, 128)
ROW = Tile(1, None)
GROUP = Tile(1, 128)


class Fp8(NamedTuple):
    """codes [R, C] in E4M3 and the fp32 scale [⌈R/rows⌉, ⌈C/columns⌉] of each tile."""

    codes: Tensor
    scale: Tensor
    tile: Tile

    def dequantize(self) -> Tensor:
        """x̂ [R, C] in fp32."""
        rows, columns = self.codes.shape
        height, width = _extent(self.codes, self.tile)
        scale = self.scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        return self.codes.float() * scale

    @property
    def scale_shape(self) -> tuple[int, int]:
        """One scale per tile."""
        (rows, columns), (height, width) = self.codes.shape, _extent(self.codes, self.tile)
        return -(-rows // height), -(-columns // width)


def encode_fp8(x: Tensor, tile: Tile) -> Fp8:
    """Quantize a matrix [R, C]; tiles at its edges are padded with zeros, which change no scale.

    One NaN or infinity makes its whole tile NaN.
    """
    rows, columns = x.shape
    height, width = _extent(x, tile)
    tiles = (
        pad(x.float(), (0, -columns % width, 0, -rows % height)).unflatten(0, (-1, height)).unflatten(2, (-1, width))
    )
    scale = quotient(tiles.abs().amax((1, 3)), E4M3_MAX)
    scale = torch.where(scale == 0, EMPTY_SCALE, scale)
    scaled = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.flatten(2).flatten(0, 1)[:rows, :columns].contiguous().to(E4M3)
    return Fp8(codes, scale, tile)


def quotient(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once: on CUDA, PyTorch multiplies by the reciprocal of a Python number and rounds twice."""
    return x / x.new_full((), number)


def round_fp8(x: Tensor, tile: Tile) -> Tensor:
    """x̂ of activations [..., C], each token a row, in fp32."""
    return encode_fp8(x.flatten(end_dim=-2), tile).dequantize().view(x.shape)


def _extent(x: Tensor, tile: Tile) -> tuple[int, int]:
    """The tile's height and width on this matrix, at least 1."""
    rows, columns = x.shape
    height = rows if tile.rows is None else tile.rows
    width = columns if tile.columns is None else tile.columns
    return max(1, height), max(1, width)


class Codes(NamedTuple):
    """x ≈ values · scale, with `values` in FP8 and a `scale` in fp32."""

    values: Tensor
    scale: Tensor


class EncodedWeight(NamedTuple):
    """W ≈ codes · scale: codes [N, K], and their transpose `turned` [K, N] for dx; None to transpose them there."""

    codes: Tensor
    turned: Tensor | None
    scale: Tensor


class Scales(NamedTuple):
    """Scalars of one product: the scales of x and g, and the largest magnitudes seen in both."""

    x: Tensor
    g: Tensor
    seen_x: Tensor
    seen_g: Tensor


def scale_of(largest: Tensor, limit: float = E4M3_MAX) -> Tensor:
    """The smallest power of two that divides `largest` to at most `limit`; not finite if `largest` is not."""
    share = largest.float() / limit
    above = ((share.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # any mantissa bit carries
    return torch.where(share.isfinite(), torch.where(above == 0, EMPTY_SCALE, above), share)


def encode(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3, limit: float = E4M3_MAX) -> Codes:
    """x in FP8 under a scale; values beyond its range are clamped."""
    return Codes((x.float() * scale.reciprocal()).clamp(-limit, limit).to(dtype), scale)


def largest_of(x: Tensor) -> Tensor:
    """max|x| in fp32; 0 for an empty tensor."""
    return x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def encode_weight(weight: Tensor) -> EncodedWeight:
    """Encode a weight [N, K] under the scale of its own values."""
    codes, scale = encode(weight.detach(), scale_of(largest_of(weight)))
    return EncodedWeight(codes, None, scale)
