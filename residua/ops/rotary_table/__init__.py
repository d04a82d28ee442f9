"""Tables of rotary positions, each one opaque call in compiled code. They have no gradient.

When the compiler fused the powers and cosines into their readers, it computed them per element and layer, which took an
eighth of the training step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.library import launcher
from residua.ops.rotary_table import reference


@launcher("rotary_cos_sin", ahead=False)
def _rotary_cos_sin(positions: Tensor, head_dim: int, theta: float) -> Iterator[tuple[Tensor, Tensor]]:
    yield reference.rotary_table(positions, head_dim, theta)


@launcher("scaled_rotary_cos_sin", ahead=False)
def _scaled_rotary_cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> Iterator[tuple[Tensor, Tensor]]:
    yield reference.scaled_rotary_table(positions, frequencies, factor)


def _rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    run = _rotary_cos_sin if torch.compiler.is_compiling() else reference.rotary_table
    return run(positions, head_dim, theta)


def _scaled_rotary_table(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    run = _scaled_rotary_cos_sin if torch.compiler.is_compiling() else reference.scaled_rotary_table
    return run(positions, frequencies, factor)


rotary_table = Operator(
    reference.rotary_table,
    lambda d: [Case((d.positions(), d.sizes.head_dim, 10_000.0), gradients=False)],
    _rotary_table,
    lambda *_: True,
)
scaled_rotary_table = Operator(
    reference.scaled_rotary_table,
    lambda d: [Case((d.positions(), d.w(d.sizes.head_dim // 2), 1.5), gradients=False)],
    _scaled_rotary_table,
    lambda *_: True,
)

__all__ = ["rotary_table", "scaled_rotary_table"]
