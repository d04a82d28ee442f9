"""GatedNorm, fused: launching the kernels, and what autograd keeps (x, one float and RANK numbers more per token)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from residua.ops._runtime import fused
from residua.ops._runtime.launch import on, operator
from residua.ops.gated_norm import backward_kernels, kernels

PITCH = 256
"""Rows of the prepared matrices are as long as a multiple of this, so that no block needs a mask."""


class Plan(NamedTuple):
    tokens: int
    block: int
    warps: int
    stages: int = 1
    programs: int = 0
    """Per multiprocessor, of a kernel that goes over tokens."""
    registers: int = 0
    """Most to a thread; 0: as the compiler likes."""

    def settings(self) -> dict[str, Any]:
        tile = {"TOKENS": self.tokens, "BLOCK": self.block, "STAGES": self.stages, "num_warps": self.warps}
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {**tile, **limit, "FAST": not fused.INTERPRETED}

    def tiles(self, tokens: int) -> int:
        return triton.cdiv(tokens, self.tokens)

    def shares(self, x: Tensor) -> tuple[int, int]:
        """The grid of a kernel that goes over tokens: blocks of channels, and programs that share the tiles of each."""
        blocks = triton.cdiv(x.shape[1], self.block)
        most = self.programs * fused.multiprocessors(x) // blocks
        return blocks, max(1, min(most, self.tiles(x.shape[0])))


class Forward(NamedTuple):
    """A kernel that goes over channels and one that goes over tokens."""

    project: Plan
    gate: Plan


class Backward(NamedTuple):
    reduce: Plan
    spread: Plan


def forward_plan(width: int, rank: int, size: int) -> Forward:
    """For elements of `size` bytes.

    Two warps to a program: with four warps and 64 rows Triton's products are asynchronous, and one whose sum goes on
    from step to step may still read x when the next tile is loaded into its buffer: x is used elsewhere too, and then
    Triton gives it one buffer too few.
    """
    if size == 4:
        return Forward(Plan(32, 64, 4, 2), Plan(32, 64, 4, 2, 3))
    return Forward(Plan(32, 64, 2, 3), Plan(32, 64, 2, 3, 8))


def backward_plan(width: int, rank: int, size: int) -> Backward:
    """The last plan's products over 64 rows are asynchronous, but each is used, and so waited for, in its own step."""
    if size == 4:
        return Backward(Plan(32, 32, 4, 2), Plan(32, 32, 4, 2, 3))
    if rank > 16:
        return Backward(Plan(32, 64, 2, 3), Plan(32, 32, 2, 3, 6))
    return Backward(Plan(32, 64, 2, 3, 0, 128), Plan(64, 64, 4, 3, 2))


def gated_norm(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, eps: float = 1e-6, **_: str) -> Tensor:
    """The operator's contract is the reference's; `_serves` has seen to it that the gate is a sigmoid per channel."""
    rows = x.reshape(-1, x.shape[-1])
    return _apply(rows, weight, down, up, eps).reshape(x.shape)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, small, rstd, bottleneck = _forward(x, weight, down, up, eps)
        ctx.save_for_backward(x, weight, down, up, small, rstd, bottleneck)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(g.contiguous(), *ctx.saved_tensors), None


@torch.compiler.allow_in_graph
def _apply(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> Tensor:
    out: Tensor = _GatedNorm.apply(x, weight, down, up, eps)
    return out


def _forward_outputs(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> tuple[Tensor, ...]:
    tokens, width = x.shape
    rank = padded(down)
    small = x.new_empty((4, rank, triton.cdiv(width, PITCH) * PITCH))
    rstd = x.new_empty((tokens,), dtype=torch.float32)
    return _rows_like(x), small, rstd, x.new_empty((tokens, rank))


def _rows_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator(
    "gated_norm(Tensor x, Tensor weight, Tensor down, Tensor up, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward_outputs,
)
def _forward(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The gated rows [M, C], the prepared matrices [4, RANK, PITCH], rstd [M] and u [M, RANK]."""
    outputs = _forward_outputs(x, weight, down, up, eps)
    _launch_forward(x, None, x, weight, down, up, eps, outputs)
    return outputs


def _added_outputs(
    x: Tensor, update: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float
) -> tuple[Tensor, ...]:
    return *_forward_outputs(x, weight, down, up, eps), _rows_like(x)


@operator(
    "gated_norm_added(Tensor x, Tensor update, Tensor weight, Tensor down, Tensor up, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _added_outputs,
)
def _forward_added(
    x: Tensor, update: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """What `gated_norm` gives for x + update [M, C], and then that sum itself, rounded to its dtype as any sum is."""
    outputs = _added_outputs(x, update, weight, down, up, eps)
    _launch_forward(x.contiguous(), update.contiguous(), outputs[4], weight, down, up, eps, outputs[:4])
    return outputs


def _launch_forward(
    x: Tensor, update: Tensor | None, added: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float,
    outputs: tuple[Tensor, ...],
) -> None:  # fmt: skip
    """The norm reads `added`: x itself, or where there is an update the rows that x + update is written to."""
    tokens, width = x.shape
    out, small, rstd, bottleneck = outputs
    sizes = {"C": width, "RANK": small.shape[1], "PITCH": small.shape[2]}
    project, gate = forward_plan(width, sizes["RANK"], x.element_size())
    weight = weight.contiguous()
    with on(x):
        kernels.prepare_kernel[(small.shape[2] // 64,)](
            weight, down.contiguous(), up.contiguous(), small, R=down.shape[0], BLOCK=64, **sizes
        )
        if tokens:
            hidden = torch.empty_like(bottleneck)
            kernels.project_kernel[(project.tiles(tokens),)](
                x, x if update is None else update, added, small, rstd, bottleneck, hidden, tokens, eps,
                ADDED=update is not None, **sizes, **project.settings(),
            )  # fmt: skip
            kernels.gate_kernel[gate.shares(x)](
                added, weight, small, rstd, hidden, out, tokens, **sizes, **gate.settings()
            )


def _backward_outputs(
    g: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, small: Tensor, rstd: Tensor, bottleneck: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(torch.empty_like(p, memory_format=torch.contiguous_format) for p in (x, weight, down, up))


@operator(
    "gated_norm_backward(Tensor g, Tensor x, Tensor weight, Tensor down, Tensor up, Tensor small, Tensor rstd, "
    "Tensor bottleneck, Tensor? residual=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_outputs,
)
def _backward(
    g: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, small: Tensor, rstd: Tensor, bottleneck: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of x, weight, down and up; to that of x the `residual` is added, before it is rounded."""
    tokens, width = x.shape
    rank = down.shape[0]
    g_x, *g_weights = outputs = _backward_outputs(g, x, weight, down, up, small, rstd, bottleneck)
    hidden, slope = torch.empty((2, *bottleneck.shape), dtype=x.dtype, device=x.device)
    pull = torch.empty_like(rstd)
    reduce, spread = backward_plan(width, small.shape[1], x.element_size())
    blocks, parts = spread.shares(x)
    partial = torch.empty((parts, 1 + 2 * rank, width), dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    sizes = {"C": width, "RANK": small.shape[1], "PITCH": small.shape[2]}
    with on(x):
        if tokens:
            backward_kernels.reduce_kernel[(reduce.tiles(tokens),)](
                g, x, weight, small, rstd, bottleneck, hidden, slope, pull, tokens, **sizes, **reduce.settings()
            )
        backward_kernels.spread_kernel[(blocks, parts)](
            g, x, g if residual is None else residual.contiguous(), weight, small, rstd, hidden, slope, pull,
            g_x, partial, tokens, R=rank, ADDED=residual is not None, **sizes, **spread.settings(),
        )  # fmt: skip
        backward_kernels.finish_kernel[(1 + 2 * rank, triton.cdiv(width, 128))](
            partial, weight, *g_weights, parts, C=width, R=rank, PARTS=32, BLOCK=128
        )
    return outputs


def padded(down: Tensor) -> int:
    """The rank as the products take it."""
    return max(16, triton.next_power_of_2(down.shape[0]))
