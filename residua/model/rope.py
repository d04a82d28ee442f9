"""Rotary positions (arXiv 2104.09864), the half-split convention."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops.norm_rotate import rotate


def _rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * theta**-exponent
    return angles.cos(), angles.sin()


_rotary_op = torch.library.custom_op("residua::rotary_table", _rotary_table, mutates_args=())


@_rotary_op.register_fake
def _(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, head_dim // 2)
    return tuple(torch.empty(shape, device=positions.device, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [..., head_dim/2] of positions [...]: position · theta^(−2i/head_dim), in float32.

    When compiled it is a custom operator, so that the table is computed once. Fused into its readers, the powers and
    cosines were computed per element and layer and took an eighth of the training step.
    """
    table = _rotary_op if torch.compiler.is_compiling() else _rotary_table
    cos, sin = table(positions, head_dim, theta)
    return cos, sin


__all__ = ["rotary_table", "rotate"]
