"""The feed-forwards of experts, fused: six grouped products that include the permutation and the activation.

With the rows s of expert e, their tokens t(s), weights v_s and gradients g of the tokens' results:

    z_s = W_up x_t(s),   a_s = v_s act(z_s),   y_t = Σ_{s of t} W_out a_s
    p_s = W_outᵀ g_t(s),   g_z,s = v_s p_s ⊙ act′(z_s),   g_v,s = p_s · act(z_s)
    g_x,t = Σ_{s of t} W_upᵀ g_z,s,   g_W_up = Σ_s g_z,s x_t(s)ᵀ,   g_W_out = Σ_s g_t(s) a_sᵀ

Kernels read token rows through the order of the slots and write results to the slots in token-major order, where a
token's slots are neighbours. So no separate pass copies rows, and no sum depends on the order of programs. Backward
needs only z, or a for relu². The sums over a token's slots are plain PyTorch, so that a compiler can fuse what follows.

The host knows the total number of rows, but not how many each expert has. Grids are large enough for any division of
the rows, so nothing waits for the GPU, and a step with experts can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime import triton_support
from residua.ops._runtime.launch import Kernels, aligned, cdiv, either, next_power_of_2
from residua.ops._runtime.library import launcher
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.tracing import differentiable
from residua.ops.expert_ffn.reference import GATED

kernels = Kernels("residua.ops.expert_ffn.kernels")


class TilePlan(NamedTuple):
    rows: int
    columns: int
    depth: int
    """Elements of the sum per step."""
    warps: int
    stages: int
    registers: int | None = None
    """Most registers per thread: with 128, two programs of 8 warps fit on a multiprocessor."""

    def sizes(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        run = {"num_warps": self.warps, "num_stages": self.stages, **limit}
        return {"ROWS": self.rows, "COLUMNS": self.columns, "DEPTH": self.depth, **run}


class Plans(NamedTuple):
    """The tiles of every product. All but `weight` have the same number of rows, because they share a table of tiles.

    `wide` is for results whose number of columns is a multiple of its own.
    """

    up: TilePlan
    gated: TilePlan
    wide: TilePlan
    slope: TilePlan
    weight: TilePlan

    def product(self, columns: int) -> TilePlan:
        """The tiles for a result with `columns` columns."""
        return self.wide if columns % self.wide.columns == 0 else self.up


def _same(plan: TilePlan) -> Plans:
    return Plans(plan, plan, plan, plan, plan)


INTERPRETED = _same(TilePlan(16, 16, 16, 4, 1))
"""Small tiles, so that tests in the interpreter cover several."""
SINGLE = _same(TilePlan(64, 64, 32, 4, 2))
"""Float32 on a GPU: no tensor cores, for exact products."""
MANY_ROWS_PLAN = Plans(
    up=TilePlan(128, 128, 64, 8, 3),
    gated=TilePlan(128, 64, 64, 8, 3),
    wide=TilePlan(128, 256, 64, 8, 3),
    slope=TilePlan(128, 128, 64, 8, 3, registers=128),
    weight=TilePlan(128, 128, 64, 8, 3),
)
FEW_ROWS_PLAN = _same(TilePlan(16, 64, 64, 4, 4))
"""Decoding and small batches: limited by reading the weights, not by arithmetic."""
PART, GATED_PART = (8, 8) if triton_support.INTERPRETED else (64, 32)
"""Columns of gradients computed at a time from a tile's sums, without and with a gate."""
FEW_ROWS = 16
"""Mean number of rows per expert up to which `FEW_ROWS_PLAN` is used."""


def plans(dtype: torch.dtype, slots: int, experts: int) -> Plans:
    if triton_support.INTERPRETED:
        return INTERPRETED
    if dtype is not torch.bfloat16:
        return SINGLE
    return FEW_ROWS_PLAN if slots <= FEW_ROWS * experts else MANY_ROWS_PLAN


@launcher("expert_tiles")
def expert_tiles(x: Tensor, ends: Tensor, slots: int) -> Iterator[Tensor]:
    """Expert, first row and end of every tile of `slots` rows, [tiles, 3]; surplus tiles have expert −1."""
    rows, experts, block = plans(x.dtype, slots, len(ends)).up.rows, len(ends), 64
    table = ends.new_empty((slots // rows + min(slots, experts), 3))
    yield table
    kernels.tiles_kernel[(cdiv(len(table), block),)](
        ends, table, len(table), E=experts, WIDE=next_power_of_2(experts), ROWS=rows, BLOCK=block, num_warps=4
    )


@launcher("expert_up")
def expert_up(
    x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, activation: str,
    choices: int, keep: bool,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """a = v act(W_up,e x) [slots, H] of tokens x [N, C] or, without an order, sorted rows; with `keep` also the sums z.

    v are the weights [slots] of the slots, or 1.
    """
    gated, slots = activation in GATED, len(x) if order is None else len(order)
    a = x.new_empty((slots, weight.shape[1] // (1 + gated)))
    z = x.new_empty((slots if keep else 0, weight.shape[1]))
    yield a, z
    chosen = plans(x.dtype, len(a), len(weight))
    plan = chosen.gated if gated else chosen.product(a.shape[1])
    kernels.up_kernel[(len(tiles) * cdiv(a.shape[1], plan.columns),)](
        aligned(x), aligned(weight), either(order, tiles), tiles, either(weights, x), z, a,
        K=x.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=gated, GATHERED=order is not None,
        WEIGHTED=weights is not None, KEPT=keep, **plan.sizes(),
    )  # fmt: skip


@launcher("expert_product")
def expert_product(x: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, turned: bool) -> Iterator[Tensor]:
    """W_e x, or W_eᵀ x if `turned`, for sorted rows x; with an order, rows are written to their slots."""
    y = x.new_empty((len(x), weight.shape[2 if turned else 1]))
    yield y
    plan = plans(x.dtype, len(x), len(weight)).product(y.shape[1])
    kernels.product_kernel[(len(tiles) * cdiv(y.shape[1], plan.columns),)](
        aligned(x), aligned(weight), either(order, tiles), tiles, y, K=x.shape[1],
        N=y.shape[1], TURNED=turned, SCATTERED=order is not None, **plan.sizes(),
    )  # fmt: skip


@launcher("expert_slope")
def expert_slope(
    g: Tensor, weight: Tensor, order: Tensor | None, tiles: Tensor, weights: Tensor | None, saved: Tensor,
    activation: str, choices: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradient of the sums z, the weighted act(z) (none for relu², which stored it), and parts of the weights'
    gradient.
    """
    slots, hidden = len(saved), weight.shape[2]
    plan = plans(g.dtype, slots, len(weight)).slope
    g_z, a = torch.empty_like(saved), g.new_empty((0 if activation == "relu2" else slots, hidden))
    columns = cdiv(hidden, plan.columns)
    dots = g.new_empty((columns if weights is not None else 0, slots), dtype=torch.float32)
    yield g_z, a, dots
    kernels.slope_kernel[(len(tiles) * columns,)](
        aligned(g), aligned(weight), either(order, tiles), tiles, either(weights, g), saved, g_z, a,
        dots, len(saved), K=g.shape[1], H=a.shape[1], CHOICES=choices, ACT=activation, GATED=activation in GATED,
        GATHERED=order is not None, WEIGHTED=weights is not None,
        PARTS=max(1, plan.columns // (GATED_PART if activation in GATED else PART)), **plan.sizes(),
    )  # fmt: skip


@launcher("expert_weight_gradients")
def expert_weight_gradients(
    g: Tensor, a: Tensor, g_z: Tensor, x: Tensor, order: Tensor | None, ends: Tensor, choices: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Σ g aᵀ [E, C, H] and Σ g_z xᵀ [E, R, C] over the rows of each expert; with an order, g and x are per token."""
    width, hidden, wide = x.shape[1], a.shape[1], g_z.shape[1]
    g_out, g_up = x.new_empty((len(ends), width, hidden)), x.new_empty((len(ends), wide, width))
    yield g_out, g_up
    plan = plans(x.dtype, len(a), len(ends)).weight
    tiles = cdiv(width, plan.rows) * cdiv(hidden, plan.columns) + cdiv(wide, plan.rows) * cdiv(width, plan.columns)
    kernels.weight_kernel[(len(ends) * tiles,)](
        aligned(g), aligned(a), aligned(g_z), aligned(x), either(order, ends), ends, g_out, g_up, C=width, H=hidden,
        R=wide, CHOICES=choices, GATHERED=order is not None,
        SHORT=len(a) * max(width, hidden, wide) < 2**31, **plan.sizes(),
    )  # fmt: skip


def expert_ffn(
    x: Tensor,
    up: Tensor,
    out: Tensor,
    ends: Tensor,
    activation: str,
    *,
    order: Tensor | None = None,
    weights: Tensor | None = None,
    up_bias: Tensor | None = None,
    out_bias: Tensor | None = None,
) -> Tensor:
    """The fused twin of `reference.expert_ffn`; only the reference supports biases.

    Matrices are cast to the products' dtype, as under autocast.
    """
    dtype = working_dtype(x)
    x, up, out = x.to(dtype), up.to(dtype), out.to(dtype)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, up, out, weights))
    ends = ends.to(torch.int32)
    if order is None or weights is None:
        order = weights = None
    else:
        order = order.to(torch.int32)
    return _expert_ffn(x, up, out, weights, order, ends, activation, keep)


def _expert_ffn_backward(ctx: Any, g: Tensor) -> Sequence[Tensor | None]:
    x, up, out, weights, order, ends, tiles, saved = ctx.saved_tensors
    choices = ctx.choices
    flat = None if weights is None else weights.reshape(-1)
    g = g.to(x.dtype).contiguous()
    g_z, a, dots = expert_slope(g, out, order, tiles, flat, saved, ctx.activation, choices)
    a = saved if ctx.activation == "relu2" else a
    g_out, g_up = expert_weight_gradients(g, a, g_z, x, order, ends, choices)
    g_x = _by_token(expert_product(g_z, up, order, tiles, True), choices)
    g_weights = None if weights is None else dots.sum(0).view_as(weights).to(weights.dtype)
    return g_x, g_up, g_out, g_weights


@differentiable(_expert_ffn_backward)
def _expert_ffn(
    ctx: Any, x: Tensor, up: Tensor, out: Tensor, weights: Tensor | None, order: Tensor | None, ends: Tensor,
    activation: str, keep: bool,
) -> Tensor:  # fmt: skip
    choices = 1 if weights is None else weights.shape[1]
    flat = None if weights is None else weights.reshape(-1)
    tiles = expert_tiles(x, ends, len(x) * choices)
    squared = activation == "relu2"
    a, z = expert_up(x, up, order, tiles, flat, activation, choices, keep and not squared)
    y = expert_product(a, out, order, tiles, False)
    ctx.save_for_backward(x, up, out, weights, order, ends, tiles, a if squared else z)
    ctx.activation, ctx.choices = activation, choices
    return _by_token(y, choices)


def _by_token(y: Tensor, choices: int) -> Tensor:
    """Sum over the slots of each token, in y's dtype: autocast would return float32."""
    return y if choices == 1 else y.unflatten(0, (-1, choices)).sum(1, dtype=y.dtype)
