"""Rotary positions (arXiv 2104.09864) in the half-split convention, with optional scaling (`config/positions.py`).

The angle of pair i at position p is p · f_i, with f_i = theta^(−2i/head_dim) unless a scaling changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.numeric import begins, wide
from residua.ops.norm_rotate import rotate
from residua.ops.rotary_table import rotary_table as plain_rotary_table
from residua.ops.rotary_table import scaled_rotary_table

if TYPE_CHECKING:
    from residua.config import positions as scalings

Frequencies = tuple[Tensor, float]
"""f [head_dim/2] in float32, and the factor on cos and sin."""


def rotary_table(
    positions: Tensor, head_dim: int, theta: float, scaling: scalings.RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin [..., head_dim/2] of positions [...], in float32."""
    if scaling is None:
        return plain_rotary_table(positions, head_dim, theta)
    return scaled_rotary_table(positions, *frequencies(positions, head_dim, theta, scaling))


def grow_queries(q: Tensor, growth: scalings.QueryGrowth, positions: Tensor, segments: Tensor | None) -> Tensor:
    """q [B, T, H, D] times 1 + beta · ln(1 + ⌊p / original⌋), p the token's position in its document.

    `positions` [T] or [B, T] count from the start of the row; with `segments` [B, S], [T] are indices into its entries.
    """
    if segments is not None:
        first = torch.where(begins(segments, segments), torch.arange(segments.shape[1], device=q.device), 0)
        positions = positions - first.cummax(1).values.index_select(1, positions)
    factor = 1 + growth.beta * torch.log(1 + (positions // growth.original_context).to(wide(q).dtype))
    return q * factor[..., None, None].to(q.dtype)


def frequencies(positions: Tensor, head_dim: int, theta: float, scaling: scalings.RopeScaling) -> Frequencies:
    """The frequencies of a scaling, with operations in the same order as in transformers, so that bits agree.

    In float32, f / factor and 1 / (factor · 1/f) differ in the last bit; at position 3,000 this grows to 3e-4.
    """
    return SCALINGS[scaling.kind](scaling, _inverse(positions, head_dim, theta), theta, positions)


def _inverse(positions: Tensor, head_dim: int, theta: float | Tensor) -> Tensor:
    """theta^(2i/head_dim): 1/f without a scaling."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    return theta**exponent


def _dynamic(config: scalings.DynamicRope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    """theta · (factor · length / original − (factor − 1))^(D / (D − 2)) for sequences longer than the original."""
    head_dim, original = 2 * len(inverse), config.original_context
    length = (positions.max() + 1).clamp(min=original)
    growth = (config.factor * length / original - (config.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / _inverse(positions, head_dim, theta * growth), 1.0


def _yarn(config: scalings.YarnRope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    """f / factor where a pair turns fewer than `beta_slow` times in the original context, f above `beta_fast`."""
    head_dim = 2 * len(inverse)

    def pair(rotations: float) -> float:
        """The pair that makes this many rotations in the original context."""
        return head_dim * math.log(config.original_context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(config.beta_fast), pair(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(inverse), device=inverse.device, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    unscaled = 1 - ramp
    return 1.0 / (config.factor * inverse) * (1 - unscaled) + 1.0 / inverse * unscaled, config.attention_factor


def _llama3(config: scalings.Llama3Rope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    f = 1.0 / inverse
    wavelength = 2 * math.pi / f
    smooth = ((config.original_context / wavelength - config.low) / (config.high - config.low)).clamp(0, 1)
    return (1 - smooth) * f / config.factor + smooth * f, 1.0


def _longrope(config: scalings.LongRope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    device = inverse.device
    short, long = (torch.tensor(each, device=device, dtype=torch.float32) for each in (config.short, config.long))
    divisor = torch.where(positions.max() + 1 > config.original_context, long, short)
    return 1.0 / (divisor * inverse), config.attention_factor


def _proportional(config: scalings.ProportionalRope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    turning = torch.arange(len(inverse), device=inverse.device) < int(config.share * 2 * len(inverse) // 2)
    return torch.where(turning, 1.0 / inverse / config.factor, 0.0), 1.0


def _partial(config: scalings.PartialRope, inverse: Tensor, theta: float, positions: Tensor) -> Frequencies:
    """f_i = theta^(−2i / (share · head_dim)) for the first pairs, 0 for the others."""
    turning = 1.0 / _inverse(positions, 2 * int(config.share * len(inverse)), theta)
    return pad(turning, (0, len(inverse) - len(turning))), 1.0


SCALINGS: dict[str, Callable[..., Frequencies]] = {
    "linear": lambda config, inverse, theta, positions: (1.0 / inverse / config.factor, 1.0),
    "dynamic_ntk": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
    "partial": _partial,
}

GROWING = ("dynamic_ntk", "longrope")
"""Scalings whose angles depend on the sequence length, so that one table of all positions cannot serve every step."""

__all__ = ["GROWING", "rotary_table", "rotate"]
