"""The feed-forward with a squared ReLU, fused: kernels of two of its six products include relu(·)² and its slope.

With a = relu(x W_inᵀ)², and so relu(x W_inᵀ) = √a:

    y = a W_outᵀ,   p = (g W_out) ⊙ 2√a,   g_x = p W_in,   g_W_in = pᵀ x,   g_W_out = gᵀ a

Only a is written and stored for the backward pass. The matrix library computes the other four products, visible to a
compiler.

The two products are y = relu(x wᵀ)² and, if `a` is given, y = (x w) ⊙ 2√a.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from residua.ops._runtime import triton_support
from residua.ops._runtime.launch import Kernels, aligned, cdiv, dense_like, described, either
from residua.ops._runtime.library import launcher
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.tracing import differentiable

kernels = Kernels("residua.ops.squared_relu.kernels")
warp_specialization = Kernels("residua.ops.squared_relu.warp_specialization")


class FlatPlan(NamedTuple):
    """Plan for `kernels.py`, where all warps of a program do the same work."""

    rows: int
    columns: int
    depth: int
    """Elements of the sum per step."""
    group: int
    """Rows of tiles that are processed together."""
    parts: int
    """Number of parts in which a tile is written."""
    warps: int
    stages: int

    def launch(self, x: Tensor, w: Tensor, a: Tensor | None, y: Tensor) -> None:
        blocks = _blocks(x, w, a, y, self.rows, self.columns, self.depth, self.parts)
        kernels.product_kernel[(_programs(y, self.rows, self.columns),)](
            *(described(*pair) for pair in blocks), len(y), N=y.shape[1], K=x.shape[1], ROWS=self.rows,
            COLUMNS=self.columns, DEPTH=self.depth, GROUP=self.group, PARTS=self.parts, SLOPES=a is not None,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip


class SpecializedPlan(NamedTuple):
    """Plan for `warp_specialization.py`, where every group of warps has its own task.

    Gluon is an experimental part of Triton: if it is missing or has moved, `otherwise` is used.
    """

    columns: int
    depth: int
    stages: int
    parts: int
    slots: int
    """Number of parts per warpgroup that fit into shared memory."""
    group: int
    otherwise: FlatPlan

    def launch(self, x: Tensor, w: Tensor, a: Tensor | None, y: Tensor) -> None:
        if not has_gluon():
            self.otherwise.launch(x, w, a, y)
            return
        rows, half = warp_specialization.ROWS.value, warp_specialization.HALF.value
        blocks = _blocks(x, w, a, y, half, self.columns, self.depth, self.parts)
        warp_specialization.product_kernel[(_programs(y, rows, self.columns),)](
            *(warp_specialization.placed(*pair) for pair in blocks),
            cdiv(y.shape[0], rows), cdiv(y.shape[1], self.columns), K=x.shape[1], STAGES=self.stages,
            PARTS=self.parts, SLOTS=self.slots, GROUP=self.group, SLOPES=a is not None, num_warps=4, maxnreg=168,
        )  # fmt: skip


def _blocks(
    x: Tensor, w: Tensor, a: Tensor | None, y: Tensor, rows: int, columns: int, depth: int, parts: int
) -> list[tuple[Tensor, list[int]]]:
    """The tensors, each with the shape of the blocks in which kernels access it."""
    part = [rows, columns // parts]
    weight = [columns, depth] if a is None else [depth, columns]
    return [(x, [rows, depth]), (w, weight), (either(a, y), part), (y, part)]


@cache
def has_gluon() -> bool:
    try:
        import residua.ops.squared_relu.warp_specialization  # noqa: F401
    except ImportError:
        return False
    return True


def _programs(y: Tensor, rows: int, columns: int) -> int:
    """One per multiprocessor, or one per tile if there are fewer."""
    return min(triton_support.multiprocessors(y), cdiv(y.shape[0], rows) * cdiv(y.shape[1], columns))


FLAT_FORWARD, FLAT_BACKWARD = FlatPlan(128, 256, 64, 8, 2, 8, 4), FlatPlan(128, 256, 64, 8, 2, 8, 3)
FORWARD: FlatPlan | SpecializedPlan = SpecializedPlan(256, 64, 4, 2, 1, 8, FLAT_FORWARD)
BACKWARD: FlatPlan | SpecializedPlan = SpecializedPlan(256, 32, 6, 4, 4, 8, FLAT_BACKWARD)
if triton_support.INTERPRETED:
    FORWARD = BACKWARD = FlatPlan(16, 32, 16, 2, 2, 4, 1)  # so small that tests cover several tiles


@launcher("squared_relu_linear")
def squared_relu_linear(x: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """a = relu(x weightᵀ)² [M, N] for x [M, K] and weight [N, K], summed in float32."""
    a = x.new_empty((x.shape[0], weight.shape[0]))
    yield a
    FORWARD.launch(aligned(x), aligned(weight), None, a)


@launcher("squared_relu_linear_backward")
def squared_relu_linear_backward(g: Tensor, weight: Tensor, a: Tensor) -> Iterator[Tensor]:
    """p = (g weight) ⊙ 2√a [M, N] for g [M, K], weight [K, N] and a [M, N], summed in float32."""
    p = dense_like(a)
    yield p
    BACKWARD.launch(aligned(g), aligned(weight), aligned(a), p)


def squared_relu_ffn(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """The fused twin of `reference.squared_relu_ffn`; weights are cast to the products' dtype, as under autocast."""
    dtype = working_dtype(x)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    return _squared_relu_ffn(rows, w_in.to(dtype), w_out.to(dtype)).reshape(x.shape)


def _squared_relu_backward(ctx: Any, g: Tensor) -> Sequence[Tensor]:
    x, w_in, w_out, a = ctx.saved_tensors
    p = squared_relu_linear_backward(g, w_out, a)
    return p @ w_in, p.t() @ x, g.t() @ a


@differentiable(_squared_relu_backward)
def _squared_relu_ffn(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    a = squared_relu_linear(x, w_in)
    ctx.save_for_backward(x, w_in, w_out, a)
    return a @ w_out.t()
