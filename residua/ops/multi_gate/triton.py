"""Multi-Gate Residuals, fused: launching the kernels, and what autograd keeps.

A junction need not keep its streams. In a chain of junctions the streams are kept at the first one of a segment; the
others keep f and β, and their backward pass repeats s ← s + β(f − s) from there on, on chip, rounded as it was then:
bit for bit the same streams, for C more values to read per repeated junction instead of n·C more to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from residua.ops import fused
from residua.ops.multi_gate import kernels
from residua.ops.multi_gate.chain import SEGMENT
from residua.ops.multi_gate.reference import _check as check


class Plan(NamedTuple):
    """How a kernel is launched: channels per tile, warps per program, tokens a program has on their way at once,
    a cap on registers (0: none) and, where programs are persistent, how many per multiprocessor."""

    block: int
    warps: int
    stages: int = 1
    registers: int = 0
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


def forward_plan(n: int, width: int) -> Plan:
    """At most 128 stream elements per thread; a warp spans 256 channels, so a channel's streams share a thread."""
    warps = _warps(n, width, 128)
    return Plan(min(256 * warps, triton.next_power_of_2(width)), warps, registers=168 if warps == 1 else 0)


def backward_plan(n: int, width: int) -> Plan:
    """The gradients are as much again to hold."""
    warps = _warps(n, width, 96)
    return Plan(min(256 * warps, triton.next_power_of_2(width)), warps, programs=max(1, 8 // warps))


def _warps(n: int, width: int, elements: int) -> int:
    return min(16, triton.next_power_of_2(triton.cdiv(triton.next_power_of_2(n) * width, 32 * elements)))


def multi_gate(
    streams: Tensor,
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The operator's contract is the reference's."""
    hidden, (after, *_) = multi_gate_chain(
        (streams,), update, gate_query, gate_bias, pool_query, competitive=competitive, eps=eps, segment=1
    )
    return hidden, after


def multi_gate_chain(
    state: Sequence[Tensor],
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    *,
    competitive: bool = True,
    eps: float = 1e-6,
    segment: int = SEGMENT,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The contract is `chain.multi_gate_chain`'s.

    Inside a segment the state is the streams, then the streams at its start, then f and the scalars of each junction
    since.
    """
    streams, *past = state
    check(streams, update, gate_bias, competitive)
    shape = streams.shape
    flat, f = streams.reshape(-1, *shape[-2:]).contiguous(), update.reshape(-1, shape[-1]).contiguous()
    hidden, after, stats = _forward(flat, f, gate_query, gate_bias, pool_query, past, competitive, eps)
    past = [*(past or [flat.detach()]), f.detach(), stats.detach()]
    left = past if len(past) // 2 < segment else []
    return hidden.reshape(update.shape), (after.reshape(shape), *left)


@torch.library.custom_op("residua::multi_gate", mutates_args=())
def _forward(
    streams: Tensor,
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    past: Sequence[Tensor],
    competitive: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """h [M, C], s' [M, N, C] and the scalars [M, 5N + 2] (β, then the 4N + 2), from s [M, N, C] and f [M, C].

    `past` is what the backward pass makes s from, or empty: then s itself is kept.
    """
    tokens, n, width = streams.shape
    hidden, after = torch.empty_like(update, dtype=streams.dtype), torch.empty_like(streams)
    stats = streams.new_empty((tokens, 5 * n + 2), dtype=torch.float32)
    plan = forward_plan(n, width)
    if tokens:
        kernels.forward_kernel[(tokens,)](
            streams,
            update,
            gate_query,
            gate_bias,
            pool_query,
            hidden,
            after,
            stats,
            eps,
            1 / width,
            width**-0.5,
            C=width,
            N=n,
            ROWS=triton.next_power_of_2(n),
            BLOCK=plan.block,
            TILES=triton.cdiv(width, plan.block),
            COMPETITIVE=competitive,
            **plan.options,
        )
    return hidden, after, stats


@_forward.register_fake
def _(
    streams: Tensor,
    update: Tensor,
    gate_query: Tensor,
    gate_bias: Tensor,
    pool_query: Tensor,
    past: Sequence[Tensor],
    competitive: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, n, _ = streams.shape
    stats = streams.new_empty((tokens, 5 * n + 2), dtype=torch.float32)
    return torch.empty_like(update, dtype=streams.dtype), torch.empty_like(streams), stats


@torch.library.custom_op("residua::multi_gate_backward", mutates_args=())
def _backward(
    g_hidden: Tensor,
    g_after: Tensor | None,
    start: Tensor,
    past_updates: Sequence[Tensor],
    past_stats: Sequence[Tensor],
    update: Tensor,
    gate_query: Tensor,
    pool_query: Tensor,
    stats: Tensor,
    competitive: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of s, of f, and of w1, w2 and the biases in one row [2C + N + 1] of float32."""
    tokens, n, width = start.shape
    g_streams, g_update = torch.empty_like(start), torch.empty_like(update)
    plan = backward_plan(n, width)
    programs = min(tokens, plan.programs * fused.multiprocessors(start))
    partial = start.new_empty((programs, 2 * width + n + 1), dtype=torch.float32)
    if tokens:
        kernels.backward_kernel[(programs,)](
            g_hidden.contiguous(),
            g_hidden if g_after is None else g_after.contiguous(),
            start,
            tuple(past_updates),
            tuple(past_stats),
            update,
            gate_query,
            pool_query,
            stats,
            g_streams,
            g_update,
            partial,
            tokens,
            eps,
            1 / width,
            width**-0.5,
            C=width,
            N=n,
            ROWS=triton.next_power_of_2(n),
            BLOCK=plan.block,
            TILES=triton.cdiv(width, plan.block),
            DEPTH=len(past_updates),
            HAS_G_AFTER=g_after is not None,
            COMPETITIVE=competitive,
            STAGES=plan.stages,
            **plan.options,
        )
    return g_streams, g_update, partial.sum(0)


@_backward.register_fake
def _(
    g_hidden: Tensor,
    g_after: Tensor | None,
    start: Tensor,
    past_updates: Sequence[Tensor],
    past_stats: Sequence[Tensor],
    update: Tensor,
    gate_query: Tensor,
    pool_query: Tensor,
    stats: Tensor,
    competitive: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _, n, width = start.shape
    return torch.empty_like(start), torch.empty_like(update), stats.new_empty((2 * width + n + 1,))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    streams, update, gate_query, gate_bias, pool_query, past, ctx.competitive, ctx.eps = inputs
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = gate_bias.dtype
    ctx.kept = max(len(past), 1)
    ctx.save_for_backward(*(past or [streams]), update, gate_query, pool_query, output[2])


def _differentiate(ctx: Any, g_hidden: Tensor | None, g_after: Tensor | None, *_: None) -> tuple[Any, ...]:
    start, *past = ctx.saved_tensors[: ctx.kept]
    update, gate_query, pool_query, stats = ctx.saved_tensors[ctx.kept :]
    g_hidden = torch.zeros_like(update) if g_hidden is None else g_hidden
    junction = (update, gate_query, pool_query, stats, ctx.competitive, ctx.eps)
    g_streams, g_update, g_rest = _backward(g_hidden, g_after, start, past[::2], past[1::2], *junction)
    n, width = start.shape[1:]
    g_w1, g_w2, g_bias = g_rest.split([width, width, n + 1])
    g_bias = (g_bias if ctx.competitive else g_bias[1:]).to(ctx.bias_dtype)
    g_past = [None] * ctx.kept if past else []
    return g_streams, g_update, g_w1.to(gate_query.dtype), g_bias, g_w2.to(pool_query.dtype), g_past, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
