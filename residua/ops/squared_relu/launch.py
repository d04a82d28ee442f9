"""The feed-forward with a squared ReLU, fused: kernels of two of its six products include relu(·)² and its slope.

With a = relu(x W_inᵀ)², and so relu(x W_inᵀ) = √a:

    y = a W_outᵀ,   p = (g W_out) ⊙ 2√a,   g_x = p W_in,   g_W_in = pᵀ x,   g_W_out = gᵀ a

Only a is written and stored for the backward pass. The matrix library computes the other four products, visible to a
compiler.

The two products are y = relu(x wᵀ)² and, if `a` is given, y = (x w) ⊙ 2√a.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from residua.ops._runtime import triton_support
from residua.ops._runtime.launch import aligned, cdiv, dense_like
from residua.ops._runtime.library import launcher
from residua.ops._runtime.numeric import working_dtype
from residua.ops._runtime.tracing import opaque
from residua.ops.squared_relu import kernels

try:  # an experimental part of Triton: if it is missing or has moved, `FlatPlan` is used
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as PlacedDescriptor

    from residua.ops.squared_relu import specialized
except ImportError:
    HAS_GLUON = False
else:
    HAS_GLUON = True


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
        part = [self.rows, self.columns // self.parts]
        weight = [self.columns, self.depth] if a is None else [self.depth, self.columns]
        tensors = (x, [self.rows, self.depth]), (w, weight), (y if a is None else a, part), (y, part)
        kernels.product_kernel[(_programs(y, self.rows, self.columns),)](
            *(self._described(*pair) for pair in tensors), len(y), N=y.shape[1], K=x.shape[1], ROWS=self.rows,
            COLUMNS=self.columns, DEPTH=self.depth, GROUP=self.group, PARTS=self.parts, SLOPES=a is not None,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip

    def _described(self, matrix: Tensor, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)


class SpecializedPlan(NamedTuple):
    """Plan for `specialized.py`, where every group of warps has its own task."""

    columns: int
    depth: int
    stages: int
    parts: int
    slots: int
    """Number of parts per warpgroup that fit into shared memory."""
    group: int

    def launch(self, x: Tensor, w: Tensor, a: Tensor | None, y: Tensor) -> None:
        rows, half = specialized.ROWS.value, specialized.HALF.value
        part = [half, self.columns // self.parts]
        weight = [self.columns, self.depth] if a is None else [self.depth, self.columns]
        tensors = (x, [half, self.depth]), (w, weight), (y if a is None else a, part), (y, part)
        specialized.product_kernel[(_programs(y, rows, self.columns),)](
            *(self._described(*pair) for pair in tensors),
            cdiv(y.shape[0], rows), cdiv(y.shape[1], self.columns), K=x.shape[1], STAGES=self.stages,
            PARTS=self.parts, SLOTS=self.slots, GROUP=self.group, SLOPES=a is not None, num_warps=4, maxnreg=168,
        )  # fmt: skip

    def _described(self, matrix: Tensor, block: list[int]) -> Any:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        return PlacedDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


def _programs(y: Tensor, rows: int, columns: int) -> int:
    """One per multiprocessor, or one per tile if there are fewer."""
    return min(triton_support.multiprocessors(y), cdiv(y.shape[0], rows) * cdiv(y.shape[1], columns))


INTERPRETED = FlatPlan(16, 32, 16, 2, 2, 4, 1)
"""Small tiles, so that tests in the interpreter cover several."""


def _plan(flat: FlatPlan, specialized: SpecializedPlan) -> FlatPlan | SpecializedPlan:
    if triton_support.INTERPRETED:
        return INTERPRETED
    return specialized if HAS_GLUON else flat


FLAT_FORWARD, FLAT_BACKWARD = FlatPlan(128, 256, 64, 8, 2, 8, 4), FlatPlan(128, 256, 64, 8, 2, 8, 3)
FORWARD = _plan(FLAT_FORWARD, SpecializedPlan(256, 64, 4, 2, 1, 8))
BACKWARD = _plan(FLAT_BACKWARD, SpecializedPlan(256, 32, 6, 4, 4, 8))


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
    y: Tensor = _squared_relu_ffn(rows, w_in.to(dtype), w_out.to(dtype))
    return y.reshape(x.shape)


class _SquaredReluFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        a = squared_relu_linear(x, w_in)
        ctx.save_for_backward(x, w_in, w_out, a)
        return a @ w_out.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out, a = ctx.saved_tensors
        p = squared_relu_linear_backward(g, w_out, a)
        return p @ w_in, p.t() @ x, g.t() @ a


_squared_relu_ffn = opaque(_SquaredReluFFN)
