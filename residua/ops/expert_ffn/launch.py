"""Products of experts: tiles and launches.

The host knows how many rows there are, but not which expert has how many. Grids are as large as any division of the
rows could need, so nothing waits for the GPU, and a step with experts can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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
    described: bool = False
    """Load matrices by TMA."""
    registers: int | None = None
    """Most registers of a thread: with 128, two programs of 8 warps fit on a multiprocessor."""

    def sizes(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        run = {"num_warps": self.warps, "num_stages": self.stages, **limit}
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, **run}


class Plans(NamedTuple):
    """The tiles of every product. All but those of `weight` have the same rows, for they share a table of tiles."""

    up: TilePlan
    gated: TilePlan
    product: TilePlan
    slope: TilePlan
    weight: TilePlan


def _same(plan: TilePlan) -> Plans:
    return Plans(plan, plan, plan, plan, plan)


INTERPRETED = _same(TilePlan(16, 16, 16, 4, 1))
"""Small tiles, so that the interpreter's tests have many of them."""
SINGLE = _same(TilePlan(64, 64, 32, 4, 2))
"""Float32 on a GPU: no tensor cores, for exact products."""
MANY = Plans(
    up=TilePlan(128, 128, 64, 8, 3),
    gated=TilePlan(128, 64, 64, 8, 3),
    product=TilePlan(128, 128, 64, 8, 3),
    slope=TilePlan(128, 128, 64, 8, 3, registers=128),
    weight=TilePlan(128, 128, 64, 8, 3),
)
FEW = _same(TilePlan(16, 64, 64, 4, 4))
"""Decoding and small batches: the weights' bytes are the limit, not arithmetic."""
PART = 8 if fused.INTERPRETED else 64
"""Columns of gradients that are computed from a tile's sums at a time."""
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
    plan = chosen.gated if gated else chosen.up
    with on(x):
        kernels.up_kernel[(len(tiles) * cdiv(a.shape[1], plan.columns),)](
            aligned(x), _described(weight, plan, turned=False), _or(order, tiles), tiles, _or(weights, x), z, a,
            K=x.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=gated, GATHERED=order is not None,
            WEIGHTED=weights is not None, KEPT=keep, DESCRIBED=plan.described, **plan.sizes(),
        )  # fmt: skip
    return a, z


def product_output(x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, turned: bool) -> Tensor:
    return x.new_empty((len(x), weight.shape[2 if turned else 1]))


def product(x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, turned: bool) -> Tensor:
    """W_e x, or W_eᵀ x if `turned`, of sorted rows x; with an order, rows are written to their slots."""
    y = product_output(x, weight, order, tiles, turned)
    plan = plans(x.dtype, len(x), len(weight)).product
    with on(x):
        kernels.product_kernel[(len(tiles) * cdiv(y.shape[1], plan.columns),)](
            aligned(x), _described(weight, plan, turned=turned), _or(order, tiles), tiles, y, K=x.shape[1],
            N=y.shape[1], TURNED=turned, SCATTERED=order is not None, DESCRIBED=plan.described, **plan.sizes(),
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
            aligned(g), _described(weight, plan, turned=True), _or(order, tiles), tiles, _or(weights, g), kept, g_z, a,
            dots, len(kept), K=g.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=activation in GATED,
            GATHERED=order is not None, WEIGHTED=weights is not None, DESCRIBED=plan.described,
            PARTS=max(1, plan.columns // PART), **plan.sizes(),
        )  # fmt: skip
    return g_z, a, dots


def weight_output(p: Tensor, q: Tensor, order: Tensor | None, ends: Tensor, choices: int, tokens_first: bool) -> Tensor:
    return p.new_empty((len(ends), p.shape[1], q.shape[1]))


def weight_gradient(
    p: Tensor, q: Tensor, order: Tensor | None, ends: Tensor, choices: int, tokens_first: bool
) -> Tensor:
    """Σ p_s q_sᵀ over the rows of each expert [E, M, N]; with an order, p or else q has the rows of tokens."""
    g_weight = weight_output(p, q, order, ends, choices, tokens_first)
    slots = len(q if tokens_first else p)
    _, m, n = g_weight.shape
    plan = plans(p.dtype, slots, len(ends)).weight
    with on(p):
        kernels.weight_kernel[(len(ends) * cdiv(m, plan.rows) * cdiv(n, plan.columns),)](
            aligned(p), aligned(q), _or(order, ends), ends, g_weight, M=m, N=n, CHOICES=choices,
            GATHERED_P=order is not None and tokens_first, GATHERED_Q=order is not None and not tokens_first,
            **plan.sizes(),
        )  # fmt: skip
    return g_weight


def _described(weight: Tensor, plan: TilePlan, *, turned: bool) -> Any:
    """The stack of matrices [E, N, K], or [E, K, N] if `turned`, as the plan loads it."""
    if not plan.described:
        return aligned(weight)
    block = [plan.depth, plan.columns] if turned else [plan.columns, plan.depth]
    return TensorDescriptor.from_tensor(aligned(weight), [1, *block])


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another one for a pointer that the kernel does not follow."""
    return other if tensor is None else tensor
