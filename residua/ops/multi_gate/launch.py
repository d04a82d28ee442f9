"""Multi-Gate Residuals: tile sizes, and launching the kernels.

A list of streams is one tensor [..., N, C] or N tensors [..., C]; all leading axes are tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.ops._runtime.launch import Kernels, aligned, cdiv, dense_like, extent, next_power_of_2, sum_rows
from residua.ops._runtime.library import launcher
from residua.ops._runtime.triton_support import multiprocessors

kernels = Kernels("residua.ops.multi_gate.kernels")
kernels_backward = Kernels("residua.ops.multi_gate.kernels_backward")


class TilePlan(NamedTuple):
    """How a kernel is launched: channels per thread at a time, warps per program, a cap on registers (0: none) and, for
    persistent kernels, programs per multiprocessor."""

    channels: int
    warps: int
    registers: int = 0
    programs: int = 1

    def settings(self, n: int, width: int) -> dict[str, Any]:
        block = min(32 * self.channels * self.warps, next_power_of_2(width))
        tile = {"C": width, "N": n, "ROWS": next_power_of_2(n), "BLOCK": block, "TILES": cdiv(width, block)}
        registers = {"maxnreg": self.registers} if self.registers else {}
        lanes = min(block, 32 * self.warps)
        return {**tile, "LANES": lanes, "num_warps": self.warps, "num_stages": 1, **registers}


def forward_plan(n: int, width: int, size: int) -> TilePlan:
    """Splits rows into pieces of 512 channels, one warp each; short rows of many streams into pieces of half that."""
    if n > 4 and width < 1024:
        return TilePlan(8 // size, 2)
    return TilePlan(16 // size, _floor(width / 512))


def backward_plan(n: int, width: int, size: int) -> TilePlan:
    """Half as many channels at a time, because the factors of every stream take registers too.

    Between 1024 and 2048 channels that would be too many pieces, so one warp processes a token.
    """
    if n <= 4 and 1024 < width < 2048:
        return TilePlan(16 // size, 1, programs=8)
    warps = _floor((n + 1) * width / 1920)
    return TilePlan(8 // size, warps, programs=max(1, (12 if n <= 4 else 8) // warps))


def _floor(wanted: float) -> int:
    """Round down to a power of two, from 1 to 16."""
    return min(16, next_power_of_2(int(wanted) + 1) // 2 or 1)


def _tile(plan: Any, n: int, x: Tensor) -> tuple[TilePlan, dict[str, Any]]:
    chosen = plan(n, x.shape[-1], x.element_size())
    return chosen, chosen.settings(n, x.shape[-1])


def _numbers(width: int, eps: float) -> tuple[float, float, float]:
    return eps, 1 / width, width**-0.5


def streams_in(streams: Sequence[Tensor]) -> int:
    return streams[0].shape[-2] if len(streams) == 1 else len(streams)


@launcher("multi_gate_forward")
def forward(
    streams: Sequence[Tensor], update: Tensor, gate_query: Tensor, gate_bias: Tensor, pool_query: Tensor,
    competitive: bool, eps: float, gain: Tensor | None = None, norm_eps: float | None = None,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """h [..., C], s' [..., N, C] and the scalars [..., 5N + 2] (β, then the 4N + 2).

    With a gain, x = gain ⊙ RMS(h) replaces h, and the scalars of h [..., N + 2] come last.
    """
    n, (*lead, width) = streams_in(streams), update.shape
    stats = update.new_empty((*lead, 5 * n + 2), dtype=torch.float32)
    outputs = [streams[0].new_empty(update.shape), streams[0].new_empty((*lead, n, width)), stats]
    outputs += [] if gain is None else [stats.new_empty((*lead, n + 2))]
    yield outputs
    _, tokens = extent(update)
    if tokens:
        _, tile = _tile(forward_plan, n, streams[0])
        kernels.forward_kernel[(tokens,)](
            tuple(aligned(s) for s in streams), aligned(update), gate_query, gate_bias, pool_query, gain,
            *(*outputs, None)[:4], norm_eps, *_numbers(width, eps), COMPETITIVE=competitive,
            NORMED=gain is not None, **tile,
        )  # fmt: skip


@launcher("multi_gate_backward")
def backward(
    g_hidden: Tensor, g_after: Sequence[Tensor], start: Sequence[Tensor], updates: Sequence[Tensor],
    stats: Sequence[Tensor], gate_query: Tensor, pool_query: Tensor, apart: bool, competitive: bool, eps: float,
    gain: Tensor | None = None, hidden_stats: Tensor | None = None,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """The gradients of s, of f, and of w1, w2 and the biases in one row [2C + N + 1] of float32.

    `updates` and `stats` are those of the junctions since `start`, ending with this one. `apart`: the streams were N
    tensors, and so are their gradients. With a gain, `g_hidden` is the gradient of x, and the row ends with that of the
    gain.
    """
    n, (*lead, width) = streams_in(start), g_hidden.shape
    shapes = [(*lead, width)] * n if apart else [(*lead, n, width)]
    g_streams, g_update = [start[0].new_empty(shape) for shape in shapes], torch.empty_like(updates[-1])
    total = stats[0].new_empty(2 * width + n + 1 + (0 if gain is None else len(gain)))
    yield [*g_streams, g_update, total]
    _, tokens = extent(g_hidden)
    plan, tile = _tile(backward_plan if gain is None else normed_backward_plan, n, start[0])
    partial = _partial(total, plan, tokens)
    if tokens:
        kernels_backward.backward_kernel[(len(partial),)](
            aligned(g_hidden), tuple(aligned(g) for g in g_after), tuple(aligned(s) for s in start),
            tuple(updates[:-1]), tuple(stats[:-1]), updates[-1], gate_query, pool_query, gain, stats[-1],
            hidden_stats, tuple(g_streams), g_update, partial, tokens, *_numbers(width, eps),
            COMPETITIVE=competitive, NORMED=gain is not None, **tile,
        )  # fmt: skip
    sum_rows(partial, total)


def normed_backward_plan(n: int, width: int, size: int) -> TilePlan:
    """As `backward_plan`, with as many registers as the programs per multiprocessor allow, for the gain's sums.

    Where one warp would process a token, it would need too many registers, so two warps do.
    """
    if n <= 4 and 1024 < width < 2048:
        return TilePlan(8 // size, 2, programs=4)
    plan = backward_plan(n, width, size)
    return plan._replace(registers=168) if n <= 4 and plan.warps <= 8 else plan


@launcher("multi_gate_invert")
def invert(after: Tensor, update: Tensor, stats: Tensor, floor: float) -> Iterator[Tensor]:
    """s [..., N, C] from s', f and the scalars of the junction between them; 1 − β is at least `floor`."""
    streams = dense_like(after)
    yield streams
    _, tokens = extent(update)
    if tokens:
        _, tile = _tile(forward_plan, after.shape[-2], after)
        kernels.invert_kernel[(tokens,)](aligned(after), aligned(update), stats, streams, floor, **tile)


@launcher("multi_gate_pool")
def pool(streams: Sequence[Tensor], query: Tensor, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    """h [..., C] of two or more streams [..., C], and the scalars [..., 2N]."""
    hidden = dense_like(streams[0])
    stats = hidden.new_empty((*hidden.shape[:-1], 2 * len(streams)), dtype=torch.float32)
    yield hidden, stats
    width, tokens = extent(hidden)
    if tokens:
        _, tile = _tile(forward_plan, len(streams), hidden)
        kernels.pool_forward_kernel[(tokens,)](
            tuple(aligned(s) for s in streams), query, hidden, stats, *_numbers(width, eps), **tile
        )


@launcher("multi_gate_pool_backward")
def pool_backward(
    g_hidden: Tensor, g_after: Sequence[Tensor], streams: Sequence[Tensor], query: Tensor, stats: Tensor, eps: float
) -> Iterator[list[Tensor]]:
    """The gradient of each stream, `g_after` (N or none) included, and that of the query."""
    g_streams, total = [dense_like(s) for s in streams], stats.new_empty(query.shape)
    yield [*g_streams, total]
    streams = [aligned(s) for s in streams]
    width, tokens = extent(g_hidden)
    plan, tile = _tile(backward_plan, len(streams), g_hidden)
    partial = _partial(total, plan, tokens)
    if tokens:
        kernels_backward.pool_backward_kernel[(len(partial),)](
            aligned(g_hidden), tuple(aligned(g) for g in g_after), tuple(streams), query, stats,
            tuple(g_streams), partial, tokens, *_numbers(width, eps), **tile,
        )  # fmt: skip
    sum_rows(partial, total)


def _partial(total: Tensor, plan: TilePlan, tokens: int) -> Tensor:
    """Partial sums, one row per program; the interpreter has few programs, so that each processes several tokens."""
    programs = multiprocessors(total) * (plan.programs if total.is_cuda else 1)
    return total.new_empty((min(tokens, programs), len(total)))
