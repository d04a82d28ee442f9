"""Tables of rotary positions: cos and sin of position times frequency, in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., head_dim/2] of p · theta^(−2i/head_dim), for positions p [...].

    The frequency is 1 / theta^(2i/head_dim), as transformers rounds it: theta^(−2i/head_dim) differs in the last bit.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * (1.0 / theta**exponent)
    return angles.cos(), angles.sin()


def scaled_rotary_table(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., n] of p · f, times a factor, for positions p [...] and frequencies f [n]."""
    angles = positions.float()[..., None] * frequencies
    return angles.cos() * factor, angles.sin() * factor
