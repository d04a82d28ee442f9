"""Products of experts: tiles and launches.

The host knows how many rows there are, but not which expert has how many. Grids are as large as any division of the
rows could need, so nothing waits for the GPU, and a step with experts can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.launch import aligned, cdiv, on, power
from residua.ops.expert_ffn import kernels
from residua.ops.expert_ffn.reference import GATED


class TilePlan(NamedTuple):
    rows: int
    columns: int
    depth: int
    """Elements of the sum per step."""
    warps: int
    stages: int
    registers: int | None = None
    """Most registers of a thread: with 128, two programs of 8 warps fit on a multiprocessor."""

    def sizes(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        run = {"num_warps": self.warps, "num_stages": self.stages, **limit}
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, **run}


class Plans(NamedTuple):
    """The tiles of every product. All but those of `weight` have the same rows, for they share a table of tiles.

    `wide` is for results whose columns are a multiple of its own.
    """

    up: TilePlan
    gated: TilePlan
    wide: TilePlan
    slope: TilePlan
    weight: TilePlan

    def product(self, columns: int) -> TilePlan:
        """The tiles of a result with so many columns."""
        return self.wide if columns % self.wide.columns == 0 else self.up


def _same(plan: TilePlan) -> Plans:
    return Plans(plan, plan, plan, plan, plan)


INTERPRETED = _same(TilePlan(16, 16, 16, 4, 1))
"""Small tiles, so that the interpreter's tests have many of them."""
SINGLE = _same(TilePlan(64, 64, 32, 4, 2))
"""Float32 on a GPU: no tensor cores, for exact products."""
MANY = Plans(
    up=TilePlan(128, 128, 64, 8, 3),
    gated=TilePlan(128, 64, 64, 8, 3),
    wide=TilePlan(128, 256, 64, 8, 3),
    slope=TilePlan(128, 128, 64, 8, 3, registers=128),
    weight=TilePlan(128, 128, 64, 8, 3),
)
FEW = _same(TilePlan(16, 64, 64, 4, 4))
"""Decoding and small batches: the weights' bytes are the limit, not arithmetic."""
PART, GATED_PART = (8, 8) if fused.INTERPRETED else (64, 32)
"""Columns of gradients that are computed from a tile's sums at a time, without and with a gate."""
FEW_ROWS = 16
"""Rows per expert, in the mean, up to which `FEW` is used."""


def plans(dtype: torch.dtype, slots: int, experts: int) -> Plans:
    if fused.INTERPRETED:
        return INTERPRETED
    if dtype is not torch.bfloat16:
        return SINGLE
    return FEW if slots <= FEW_ROWS * experts else MANY


def tiles_output(x: Tensor, ends: Tensor, slots: int) -> Tensor:
    rows = plans(x.dtype, slots, len(ends)).up.rows
    return ends.new_empty((slots // rows + min(slots, len(ends)), 3))


def tiles(x: Tensor, ends: Tensor, slots: int) -> Tensor:
    """Expert, first row and end of every tile of `slots` rows, [tiles, 3]; surplus tiles have expert −1."""
    table = tiles_output(x, ends, slots)
    rows, experts = plans(x.dtype, slots, len(ends)).up.rows, len(ends)
    block = 64
    with on(x):
        kernels.tiles_kernel[(cdiv(len(table), block),)](
            ends, table, len(table), E=experts, WIDE=power(experts), ROWS=rows, BLOCK=block, num_warps=4
        )
    return table


def up_outputs(
    x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, activation: str,
    choices: int, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots = len(x) if order is None else len(order)
    wide, hidden = weight.shape[1], weight.shape[1] // (1 + (activation in GATED))
    return x.new_empty((slots, hidden)), x.new_empty((slots if keep else 0, wide))


def up(
    x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, activation: str,
    choices: int, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """a = v act(W_up,e x) [slots, H] of tokens x [N, C] or, without an order, sorted rows; with `keep` the sums, too.

    v are the weights [slots] of the slots, or 1.
    """
    a, z = up_outputs(x, weight, order, tiles, weights, activation, choices, keep)
    gated = activation in GATED
    chosen = plans(x.dtype, len(a), len(weight))
    plan = chosen.gated if gated else chosen.product(a.shape[1])
    with on(x):
        kernels.up_kernel[(len(tiles) * cdiv(a.shape[1], plan.columns),)](
            aligned(x), aligned(weight), _or(order, tiles), tiles, _or(weights, x), z, a,
            K=x.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=gated, GATHERED=order is not None,
            WEIGHTED=weights is not None, KEPT=keep, **plan.sizes(),
        )  # fmt: skip
    return a, z


def product_output(x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, turned: bool) -> Tensor:
    return x.new_empty((len(x), weight.shape[2 if turned else 1]))


def product(x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, turned: bool) -> Tensor:
    """W_e x, or W_eᵀ x if `turned`, of sorted rows x; with an order, rows are written to their slots."""
    y = product_output(x, weight, order, tiles, turned)
    plan = plans(x.dtype, len(x), len(weight)).product(y.shape[1])
    with on(x):
        kernels.product_kernel[(len(tiles) * cdiv(y.shape[1], plan.columns),)](
            aligned(x), aligned(weight), _or(order, tiles), tiles, y, K=x.shape[1],
            N=y.shape[1], TURNED=turned, SCATTERED=order is not None, **plan.sizes(),
        )  # fmt: skip
    return y


def slope_outputs(
    g: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, kept: Tensor,
    activation: str, choices: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    slots, hidden = len(kept), weight.shape[2]
    columns = cdiv(hidden, plans(g.dtype, slots, len(weight)).slope.columns)
    dots = g.new_empty((columns if weights is not None else 0, slots), dtype=torch.float32)
    return torch.empty_like(kept), g.new_empty((0 if activation == "relu2" else slots, hidden)), dots


def slope(
    g: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, kept: Tensor,
    activation: str, choices: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of the sums z, the weighted act(z) (of relu², which keeps it, none), and parts of the weights'."""
    g_z, a, dots = slope_outputs(g, weight, order, tiles, weights, kept, activation, choices)
    plan = plans(g.dtype, len(kept), len(weight)).slope
    with on(g):
        kernels.slope_kernel[(len(tiles) * cdiv(a.shape[1], plan.columns),)](
            aligned(g), aligned(weight), _or(order, tiles), tiles, _or(weights, g), kept, g_z, a,
            dots, len(kept), K=g.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=activation in GATED,
            GATHERED=order is not None, WEIGHTED=weights is not None,
            PARTS=max(1, plan.columns // (GATED_PART if activation in GATED else PART)), **plan.sizes(),
        )  # fmt: skip
    return g_z, a, dots


def weight_outputs(
    g: Tensor, a: Tensor, g_z: Tensor, x: Tensor, order: Tensor | None, ends: Tensor, choices: int
) -> tuple[Tensor, Tensor]:
    width, experts = x.shape[1], len(ends)
    return x.new_empty((experts, width, a.shape[1])), x.new_empty((experts, g_z.shape[1], width))


def weight_gradients(
    g: Tensor, a: Tensor, g_z: Tensor, x: Tensor, order: Tensor | None, ends: Tensor, choices: int
) -> tuple[Tensor, Tensor]:
    """Σ g aᵀ [E, C, H] and Σ g_z xᵀ [E, R, C] over the rows of each expert; with an order, g and x are of tokens."""
    g_out, g_up = weight_outputs(g, a, g_z, x, order, ends, choices)
    _, width, hidden = g_out.shape
    plan, wide = plans(x.dtype, len(a), len(ends)).weight, g_up.shape[1]
    tiles = cdiv(width, plan.rows) * cdiv(hidden, plan.columns) + cdiv(wide, plan.rows) * cdiv(width, plan.columns)
    with on(x):
        kernels.weight_kernel[(len(ends) * tiles,)](
            aligned(g), aligned(a), aligned(g_z), aligned(x), _or(order, ends), ends, g_out, g_up, C=width, H=hidden,
            R=wide, CHOICES=choices, GATHERED=order is not None,
            SHORT=len(a) * max(width, hidden, wide) < 2**31, **plan.sizes(),
        )  # fmt: skip
    return g_out, g_up


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another one for a pointer that the kernel does not follow."""
    return other if tensor is None else tensor
