"""Rotary positions (arXiv 2104.09864), the half-split convention."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm_rotate import rotate


@torch.library.custom_op("residua::rotary_table", mutates_args=())
def _rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] * theta**-exponent
    return angles.cos(), angles.sin()


@_rotary_table.register_fake
def _(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], head_dim // 2)
    return tuple(torch.empty(shape, device=positions.device, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim/2] of position · theta^(−2i/head_dim), in float32.

    An operator of its own, so that a compiled model computes the table once: fused into its readers, powers and cosines
    of every element of every layer took an eighth of the training step.
    """
    cos, sin = _rotary_table(positions, head_dim, theta)
    return cos, sin


__all__ = ["rotary_table", "rotate"]
