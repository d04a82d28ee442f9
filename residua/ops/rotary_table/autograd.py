"""Rotary tables as operators: a compiler sees one opaque call. They have no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from residua.ops._runtime.library import operator
from residua.ops.rotary_table import reference


def _empty(positions: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, pairs)
    return tuple(torch.empty(shape, device=positions.device, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


plain = operator(
    "rotary_cos_sin(Tensor positions, int head_dim, float theta) -> (Tensor, Tensor)",
    reference.rotary_table,
    lambda positions, head_dim, theta: _empty(positions, head_dim // 2),
    ahead=False,
)
scaled = operator(
    "scaled_rotary_cos_sin(Tensor positions, Tensor frequencies, float factor) -> (Tensor, Tensor)",
    reference.scaled_rotary_table,
    lambda positions, frequencies, factor: _empty(positions, len(frequencies)),
    ahead=False,
)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    cos, sin = (plain if torch.compiler.is_compiling() else reference.rotary_table)(positions, head_dim, theta)
    return cos, sin


def scaled_rotary_table(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    run = scaled if torch.compiler.is_compiling() else reference.scaled_rotary_table
    cos, sin = run(positions, frequencies, factor)
    return cos, sin
