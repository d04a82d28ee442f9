"""The symmetric product with half the work: tiles, programs, and tensors in a layout that TMA can load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, described
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.symmetric_product.kernels")


class TilePlan(NamedTuple):
    block: int
    """Rows and columns of a tile."""
    depth: int
    """Columns of X multiplied at a time."""
    warps: int
    stages: int
    flat: bool
    """Whether to load the next tile while one is written."""

    def triangle(self, m: int) -> int:
        """The number of tiles on and below the diagonal of an m×m matrix."""
        rows = cdiv(m, self.block)
        return rows * (rows + 1) // 2


PLANS = {torch.bfloat16: TilePlan(128, 64, 8, 4, True), torch.float32: TilePlan(16, 16, 4, 2, False)}
"""Float32 is for the interpreter, with tiles small enough that small tests cover several."""


@launcher("symmetric_product")
def forward(x: Tensor, c: Tensor | None, alpha: float, beta: float, gamma: float) -> Iterator[Tensor]:
    """S = αXXᵀ + βC + γI. It has no gradient: only an optimizer uses it."""
    s = _pitched(x, x.shape[1], x.shape[1])
    yield s
    if s.numel():
        launch(PLANS[x.dtype], x, c, s, alpha, beta, gamma)


def symmetric_product(
    x: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0, gamma: float = 0.0
) -> Tensor:
    """The fused twin of `reference.symmetric_product`."""
    return forward(x, c, alpha, beta, gamma)


def launch(plan: TilePlan, x: Tensor, c: Tensor | None, s: Tensor, alpha: float, beta: float, gamma: float) -> None:
    """s ← αXXᵀ + βC + γI."""
    block, depth = plan.block, plan.depth
    turned = not _walkable(x) and _walkable(x.mT)
    stored = x.mT if turned else _walked(x)
    triangle = plan.triangle(x.shape[1])
    tiles, square = triangle * len(x), [1, block, block]
    kernels.product_kernel[(min(tiles, multiprocessors(x)),)](
        described(stored, [1, depth, block] if turned else [1, block, depth]),
        described(s if c is None else _walked(c), square),
        described(s, square),
        tiles, triangle, x.shape[2], float(alpha), float(beta), float(gamma),
        TURNED=turned, ADDED=c is not None, BLOCK=block, DEPTH=depth, FLAT=plan.flat,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip


def _walkable(x: Tensor) -> bool:
    """Whether TMA can load x: dense rows, with all strides and the address multiples of 16 bytes."""
    steps = [step * x.element_size() for step in x.stride()[:-1]]
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)


def _walked(x: Tensor) -> Tensor:
    return x if _walkable(x) else _pitched(x, *x.shape[1:]).copy_(x)


def _pitched(x: Tensor, rows: int, columns: int) -> Tensor:
    """An empty stack of as many matrices as in x, whose rows start at multiples of 16 bytes."""
    per_row = 16 // x.element_size()
    return x.new_empty(len(x), rows, cdiv(columns, per_row) * per_row)[..., :columns]
