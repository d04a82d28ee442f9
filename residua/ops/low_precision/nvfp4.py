"""NVFP4: E2M1 values in blocks of 16 with an E4M3 scale each, under a second scale in fp32 (arXiv 2509.25149).

    t = max|x| / (448 · 6),   s = E4M3(clamp(max|block| / 6 / t, 2⁻⁶, 448)),   code = E2M1(clamp(x · (t⁻¹ / s), ±6))
    x̂ = value(code) · (s / t⁻¹)

max|x| is over the whole tensor for weights and, dynamically, over each token for activations, as in arXiv 2601.22966.
The second scale is stored as `global_scale` = t⁻¹, as in checkpoints, and engines divide by it. All arithmetic is in
fp32, rounding is to nearest, ties to even; bits are the same on CPU and GPU.

Engines have one second scale for all activations of a module, from calibration, and round as compressed-tensors does: s
may be subnormal, and values beyond the calibrated range are clamped.

    t⁻¹ = 448 · 6 / max|x|,   s = E4M3(min(t⁻¹ · max|block| / 6, 448)), 2⁻³ if that is 0,   code = E2M1(x / (s / t⁻¹))
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops.low_precision.fp8 import E4M3, E4M3_MAX, quotient

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = E2M1[-1]
SMALLEST_SCALE = torch.finfo(E4M3).tiny
SMALLEST_SECOND = 2.0**-119
"""Keeps t⁻¹ / s finite: values far below 10⁻³² become zero."""
SMALLEST_PEAK = 1e-12
"""Lower bound of calibrated ranges, so that t⁻¹ is finite."""
SCALE_OF_ZERO = 0.125
"""The scale of a block whose scale would be zero, as in compressed-tensors for activations."""
SIGN = 8

Span = Literal["tensor", "token"]


def _ties() -> list[float]:
    """The thresholds of rounding to E2M1: halfway, with ties to the even code, so every other bound is inclusive."""
    halfway = [(a + b) / 2 for a, b in pairwise(E2M1)]
    cpu = torch.device("cpu")  # transformers imports this file under torch.device("meta")
    below = torch.nextafter(torch.tensor(halfway, device=cpu), torch.tensor(-math.inf, device=cpu)).tolist()
    return [tie if code % 2 == 0 else under for code, (tie, under) in enumerate(zip(halfway, below, strict=True))]


TIES = _ties()


class Nvfp4(NamedTuple):
    """codes [R, ⌈C/16⌉·16] uint8 in 0 … 15, sign in bit 3; scale [R, ⌈C/16⌉] E4M3; global_scale [1] or [R, 1] fp32."""

    codes: Tensor
    scale: Tensor
    global_scale: Tensor
    columns: int

    def dequantize(self) -> Tensor:
        """x̂ [R, C] in fp32."""
        return self._times(self.scale.float() / self.global_scale)

    def unscaled(self) -> Tensor:
        """x̂ · t⁻¹ [R, C] in bf16: exact, since a value of E2M1 times one of E4M3 has at most six significant bits."""
        return self._times(self.scale.bfloat16())

    def _times(self, step: Tensor) -> Tensor:
        """The values of the codes, each block times its step [R, ⌈C/16⌉], in the step's dtype."""
        blocks: Tensor = e2m1_values(self.codes).to(step.dtype).unflatten(-1, (-1, GROUP))
        return (blocks * step[..., None]).flatten(-2)[:, : self.columns]

    @property
    def scale_shape(self) -> tuple[int, int]:
        """One scale per block of 16."""
        rows, columns = self.codes.shape
        return rows, columns // GROUP

    def packed(self) -> Tensor:
        """[R, ⌈C/16⌉·8] uint8: two codes a byte, the earlier one in the low half."""
        pairs: Tensor = self.codes.unflatten(-1, (-1, 2))
        low, high = pairs.unbind(-1)
        return low | (high << 4)

    @classmethod
    def unpacked(cls, packed: Tensor, scale: Tensor, global_scale: Tensor, columns: int) -> Nvfp4:
        """The inverse of `packed`."""
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return cls(codes, scale, global_scale, columns)


def encode_nvfp4(x: Tensor, span: Span, *, height: int = 1, noise: Tensor | None = None) -> Nvfp4:
    """Quantize a matrix [R, C]; the last block of a row is padded with zeros. A second scale covers one `span`.

    NaN and infinity make all values under their second scale NaN. A block has `height` rows, which must divide R. With
    `noise` in [0, 1), of x's shape, rounding is stochastic.
    """
    columns = x.shape[-1]
    blocks = in_blocks(x)
    peak = blocks.abs().amax(-1)
    if height > 1:
        peak = peak.unflatten(0, (-1, height)).amax(1).repeat_interleave(height, 0)
    most = peak if peak.numel() else pad(peak, (0, 1, 0, span == "tensor"))  # gives an empty matrix a maximum too
    largest = most.amax().view(1) if span == "tensor" else most.amax(-1, keepdim=True)
    second = quotient(largest, E4M3_MAX * E2M1_MAX).clamp(min=SMALLEST_SECOND)
    scale = (quotient(peak, E2M1_MAX) / second).clamp(SMALLEST_SCALE, E4M3_MAX).to(E4M3)
    global_scale = torch.ones_like(second) / second
    scaled = blocks * (global_scale / scale.float())[..., None]
    codes = e2m1_codes(scaled) if noise is None else stochastic_e2m1_codes(scaled, in_blocks(noise))
    return Nvfp4(codes.flatten(-2), scale, global_scale, columns)


def in_blocks(x: Tensor) -> Tensor:
    """[R, C] → [R, ⌈C/16⌉, 16] in fp32, padded with zeros."""
    return pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def round_nvfp4(x: Tensor) -> Tensor:
    """x̂ of activations [..., C] in fp32, with a second scale per token."""
    return encode_nvfp4(x.flatten(end_dim=-2), "token").dequantize().view(x.shape)


def static_scale(peak: float) -> float:
    """t⁻¹ of activations whose largest magnitude is `peak`, a number of fp32."""
    return float(torch.tensor(E4M3_MAX * E2M1_MAX / max(peak, SMALLEST_PEAK), dtype=torch.float32))


def encode_nvfp4_static(x: Tensor, global_scale: float) -> Nvfp4:
    """Quantize a matrix [R, C] under a given second scale, as engines round activations."""
    columns = x.shape[-1]
    blocks = in_blocks(x)
    second = blocks.new_full((1,), global_scale)
    scale = (quotient(blocks.abs().amax(-1), E2M1_MAX) * second).clamp(max=E4M3_MAX).to(E4M3).float()
    scale = torch.where(scale == 0, SCALE_OF_ZERO, scale)
    codes = e2m1_codes(blocks / (scale / second)[..., None])
    return Nvfp4(codes.flatten(-2), scale.to(E4M3), second, columns)


def round_nvfp4_static(x: Tensor, global_scale: float) -> Tensor:
    """x̂ of activations [..., C] in fp32, with a second scale from calibration; infinity becomes NaN."""
    low = encode_nvfp4_static(x.flatten(end_dim=-2), global_scale).dequantize().view(x.shape)
    return low + (x.float() - x.float())  # clamping infinity, as an engine does, would hide it


def e2m1_codes(x: Tensor) -> Tensor:
    """The codes 0 … 15 of the nearest E2M1 values, uint8."""
    # by comparisons: a lookup table would be copied to the device, which a CUDA graph does not allow
    size, codes = x.abs(), torch.signbit(x).to(torch.uint8) * SIGN
    for tie in TIES:
        codes += size > tie
    return codes


def stochastic_e2m1_codes(x: Tensor, noise: Tensor) -> Tensor:
    """Codes of one of the two E2M1 values around x, so that their mean over uniform `noise` is x (cut off at ±6)."""
    size = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    value = torch.floor(size / step + noise) * step
    magnitude = torch.minimum(torch.minimum(2 * value, value + 2), value / 2 + 4)  # the inverse of `e2m1_values`
    return magnitude.to(torch.uint8) + torch.signbit(x).to(torch.uint8) * SIGN


def e2m1_values(codes: Tensor) -> Tensor:
    """The values of codes, fp32: max(m/2, m − 2, 2m − 8) of the magnitude m, which is the table `E2M1`."""
    m = (codes & (SIGN - 1)).float()
    value = torch.maximum(torch.maximum(m * 0.5, m - 2), m * 2 - 8)
    return torch.where(codes >= SIGN, -value, value)
