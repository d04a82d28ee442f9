"""Output norm and gate: tile sizes, and launching the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import cdiv, on, sum_rows
from residua.ops.gated_output import kernels


class RowPlan(NamedTuple):
    elements: int
    """Of a tile."""
    warps: int
    programs: int = 0
    """Programs per multiprocessor, of a persistent kernel."""

    def rows(self, width: int) -> int:
        return max(1, self.elements // width)


FORWARD, BACKWARD = RowPlan(1024, 2), RowPlan(1024, 4, 8)


def forward_outputs(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return o.new_empty(o.shape)


def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y [B, T, H, D]."""
    y, (o, z) = forward_outputs(o, z, weight, eps), (_dense(o), _dense(z))
    rows, width = o.shape[:3].numel(), o.shape[3]
    tile = FORWARD.rows(width)
    with on(o):
        kernels.forward_kernel[(cdiv(rows, tile),)](
            o, z, weight.contiguous(), y, rows, *o.shape[1:3], *o.stride()[:2], *z.stride()[:2], eps,
            D=width, ROWS=tile, num_warps=FORWARD.warps,
        )  # fmt: skip
    return y


def backward_outputs(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return o.new_empty(o.shape), z.new_empty(z.shape), weight.new_empty(weight.shape, dtype=torch.float32)


def backward(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of o, z and the weight."""
    outputs = backward_outputs(dy, o, z, weight, eps)
    launch_backward(dy, o, z, weight, eps, *outputs)
    return outputs


def launch_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, d_o: Tensor, d_z: Tensor, d_weight: Tensor
) -> None:
    """Write into d_o, d_z, which may be a part of something wider, and d_weight."""
    dy, o, z = (_dense(x) for x in (dy, o, z))
    rows, width = o.shape[:3].numel(), o.shape[3]
    tile = BACKWARD.rows(width)
    tiles = cdiv(rows, tile)
    programs = min(tiles, BACKWARD.programs * fused.multiprocessors(o))
    partial = d_weight.new_empty((programs, width))
    with on(o):
        kernels.backward_kernel[(programs,)](
            dy, o, z, weight.contiguous(), d_o, d_z, partial, rows, o.shape[1], tiles, o.shape[2],
            *dy.stride()[:2], *o.stride()[:2], *z.stride()[:2], *d_z.stride()[:2], eps,
            D=width, ROWS=tile, num_warps=BACKWARD.warps,
        )  # fmt: skip
        sum_rows(partial, d_weight)


def _dense(x: Tensor) -> Tensor:
    """With the last two axes dense; a token may be a part of something wider."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()
