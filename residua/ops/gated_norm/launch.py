"""GatedNorm: operators, tile sizes, launches and gradients.

Stored for backward: x, and one float and RANK numbers per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, cdiv, dense_like, next_power_of_2
from residua.ops._runtime.library import launcher
from residua.ops._runtime.tracing import differentiable
from residua.ops._runtime.triton_support import INTERPRETED, multiprocessors

kernels = Kernels("residua.ops.gated_norm.kernels")

PITCH = 256
"""Rows of the prepared matrices are padded to a multiple of this, so that no block needs a mask."""


class TilePlan(NamedTuple):
    tokens: int
    block: int
    warps: int
    stages: int = 1
    programs: int = 0
    """Programs per multiprocessor, for a kernel that loops over tokens."""
    registers: int = 0
    """Most registers per thread; 0: the compiler chooses."""

    def settings(self) -> dict[str, Any]:
        tile = {"TOKENS": self.tokens, "BLOCK": self.block, "STAGES": self.stages, "num_warps": self.warps}
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {**tile, **limit, "FAST": not INTERPRETED}

    def tiles(self, tokens: int) -> int:
        return cdiv(tokens, self.tokens)

    def shares(self, x: Tensor) -> tuple[int, int]:
        """The grid of a kernel that loops over tokens: blocks of channels, and the programs that share each block."""
        blocks = cdiv(x.shape[1], self.block)
        most = self.programs * multiprocessors(x) // blocks
        return blocks, max(1, min(most, self.tiles(x.shape[0])))


def forward_plan(size: int) -> tuple[TilePlan, TilePlan]:
    """The plans of project, which loops over channels, and gate, which loops over tokens, for elements of `size` bytes.

    Two warps per program, because with four warps and 64 rows Triton's products are asynchronous. A product that
    accumulates over steps may then still read x when the next tile is loaded into its buffer: x has a second use, for
    which Triton allocates one buffer too few.
    """
    if size == 4:
        return TilePlan(32, 64, 4, 2), TilePlan(32, 64, 4, 2, 3)
    return TilePlan(32, 64, 2, 3), TilePlan(32, 64, 2, 3, 8)


def backward_plan(rank: int, size: int) -> tuple[TilePlan, TilePlan]:
    """The plans of reduce and spread. The last one's products over 64 rows are asynchronous, but each step waits for
    its own results."""
    if size == 4:
        return TilePlan(32, 32, 4, 2), TilePlan(32, 32, 4, 2, 3)
    if rank > 16:
        return TilePlan(32, 64, 2, 3), TilePlan(32, 32, 2, 3, 6)
    return TilePlan(32, 64, 2, 3, 0, 128), TilePlan(64, 64, 4, 3, 2)


@launcher("gated_norm")
def forward(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float, update: Tensor | None = None
) -> Iterator[list[Tensor]]:
    """The gated rows [M, C], the prepared matrices [4, RANK, PITCH], rstd [M] and u [M, RANK]. With an update, of
    x + update, and also that sum, rounded to its dtype."""
    (tokens, width), rank = x.shape, padded(down)
    small = x.new_empty((4, rank, cdiv(width, PITCH) * PITCH))
    outputs = [dense_like(x), small, x.new_empty((tokens,), dtype=torch.float32), x.new_empty((tokens, rank))]
    outputs += [] if update is None else [dense_like(x)]
    yield outputs
    out, small, rstd, bottleneck, *sums = outputs
    sizes = {"C": width, "RANK": rank, "PITCH": small.shape[2]}
    project, gate = forward_plan(x.element_size())
    weight = weight.contiguous()
    x, update = (x, x) if update is None else (x.contiguous(), update.contiguous())
    (added,) = sums or [x]  # the norm's input
    kernels.prepare_kernel[(small.shape[2] // 64,)](
        weight, down.contiguous(), up.contiguous(), small, R=down.shape[0], BLOCK=64, **sizes
    )
    if tokens:
        hidden = torch.empty_like(bottleneck)
        kernels.project_kernel[(project.tiles(tokens),)](
            x, update, added, small, rstd, bottleneck, hidden, tokens, eps,
            ADDED=len(sums) > 0, **sizes, **project.settings(),
        )  # fmt: skip
        kernels.gate_kernel[gate.shares(x)](added, weight, small, rstd, hidden, out, tokens, **sizes, **gate.settings())


@launcher("gated_norm_backward")
def backward(
    g: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, small: Tensor, rstd: Tensor, bottleneck: Tensor,
    residual: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The gradients of x, weight, down and up; `residual` is added to x's gradient before rounding."""
    outputs = dense_like(x), dense_like(weight), dense_like(down), dense_like(up)
    yield outputs
    (tokens, width), rank = x.shape, down.shape[0]
    hidden, slope = torch.empty((2, *bottleneck.shape), dtype=x.dtype, device=x.device)
    pull = torch.empty_like(rstd)
    reduce, spread = backward_plan(small.shape[1], x.element_size())
    blocks, parts = spread.shares(x)
    partial = torch.empty((parts, 1 + 2 * rank, width), dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    sizes = {"C": width, "RANK": small.shape[1], "PITCH": small.shape[2]}
    if tokens:
        kernels.reduce_kernel[(reduce.tiles(tokens),)](
            g, x, weight, small, rstd, bottleneck, hidden, slope, pull, tokens, **sizes, **reduce.settings()
        )
    kernels.spread_kernel[(blocks, parts)](
        g, x, g if residual is None else residual.contiguous(), weight, small, rstd, hidden, slope, pull,
        outputs[0], partial, tokens, R=rank, ADDED=residual is not None, **sizes, **spread.settings(),
    )  # fmt: skip
    kernels.finish_kernel[(1 + 2 * rank, cdiv(width, 128))](
        partial, weight, *outputs[1:], parts, C=width, R=rank, PARTS=32, BLOCK=128
    )


def padded(down: Tensor) -> int:
    """The rank, padded to a size that matrix products support."""
    return max(16, next_power_of_2(down.shape[0]))


def gated_norm(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, eps: float = 1e-6, **_: str) -> Tensor:
    """The fused twin of `reference.gated_norm`; its predicate guarantees one sigmoid gate per channel."""
    return _gated_norm(x.reshape(-1, x.shape[-1]), weight, down, up, eps).reshape(x.shape)


def _gated_norm_backward(ctx: Any, g: Tensor) -> Sequence[Tensor]:
    return backward(g.contiguous(), *ctx.saved_tensors)


@differentiable(_gated_norm_backward)
def _gated_norm(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out, small, rstd, bottleneck = forward(x, weight, down, up, eps)
    ctx.save_for_backward(x, weight, down, up, small, rstd, bottleneck)
    return out
