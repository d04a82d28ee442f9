"""Output norm and gate: operators, tile sizes, launches and gradients. Backward needs only the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, sum_rows
from residua.ops._runtime.library import differentiate, launcher
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.gated_output.kernels")


class RowPlan(NamedTuple):
    elements: int
    """Elements per tile."""
    warps: int
    programs: int = 0
    """Programs per multiprocessor, for a persistent kernel."""

    def rows(self, width: int) -> int:
        return max(1, self.elements // width)


FORWARD, BACKWARD = RowPlan(1024, 2), RowPlan(1024, 4, 8)


@launcher("gated_output")
def forward(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Iterator[Tensor]:
    """y [B, T, H, D]."""
    y = o.new_empty(o.shape)
    yield y
    launch_forward(o, z, weight, eps, y, gate)


def launch_forward(o: Tensor, z: Tensor, weight: Tensor, eps: float, y: Tensor, gate: str = "silu") -> None:
    o, z = _dense(o), _dense(z)
    rows, width = o.shape[:3].numel(), o.shape[3]
    tile = FORWARD.rows(width)
    kernels.forward_kernel[(cdiv(rows, tile),)](
        o, z, weight.contiguous(), y, rows, *o.shape[1:3], *o.stride()[:2], *z.stride()[:2], eps,
        D=width, ROWS=tile, SILU=gate == "silu", num_warps=FORWARD.warps,
    )  # fmt: skip


@launcher("gated_output_backward")
def backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The gradients of o, z and the weight."""
    outputs = o.new_empty(o.shape), z.new_empty(z.shape), weight.new_empty(weight.shape, dtype=torch.float32)
    yield outputs
    launch_backward(dy, o, z, weight, eps, *outputs, gate)


def launch_backward(
    dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, eps: float, d_o: Tensor, d_z: Tensor, d_weight: Tensor,
    gate: str = "silu",
) -> None:  # fmt: skip
    """Write into d_o, d_z (which may be part of a wider tensor) and d_weight."""
    dy, o, z = (_dense(x) for x in (dy, o, z))
    rows, width = o.shape[:3].numel(), o.shape[3]
    tile = BACKWARD.rows(width)
    tiles = cdiv(rows, tile)
    programs = min(tiles, BACKWARD.programs * multiprocessors(o))
    partial = d_weight.new_empty((programs, width))
    kernels.backward_kernel[(programs,)](
        dy, o, z, weight.contiguous(), d_o, d_z, partial, rows, o.shape[1], tiles, o.shape[2],
        *dy.stride()[:2], *o.stride()[:2], *z.stride()[:2], *d_z.stride()[:2], eps,
        D=width, ROWS=tile, SILU=gate == "silu", num_warps=BACKWARD.warps,
    )  # fmt: skip
    sum_rows(partial, d_weight)


def _dense(x: Tensor) -> Tensor:
    """x with its last two axes dense; a token may be part of a wider row."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def gated_output(o: Tensor, z: Tensor, weight: Tensor, *, eps: float = 1e-6, gate: str = "silu") -> Tensor:
    """The fused twin of `reference.gated_output`."""
    return forward(o, z, weight, eps, gate)


@differentiate(forward)
def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    o, z, weight = ctx.saved_tensors
    d_o, d_z, d_weight = backward(dy, o, z, weight, *ctx.settings)
    return d_o, d_z, d_weight.to(weight.dtype)
