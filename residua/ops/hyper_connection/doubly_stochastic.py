"""Sinkhorn's normalisation, fused: all iterations on chip, forward and backward.

In logarithms an iteration takes a column's and then a row's log-sum-exp off the matrix. Its gradient is
dL − exp(L') Σ dL over the same axis, L' being the matrix after it. The backward pass repeats the iterations, notes what
each took off (2N numbers per token, in a scratch that lives as long as the kernel), and walks back by putting it on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements of a tile


@triton.jit
def _logsumexp(x, live, AXIS: tl.constexpr):
    """Over one axis of the matrix, kept; 0 where a row or column is only padding."""
    top = tl.where(live, tl.expand_dims(tl.max(x, AXIS), AXIS), 0.0)
    total = tl.expand_dims(tl.sum(tl.exp(x - top), AXIS), AXIS)
    return tl.where(live, tl.log(tl.where(live, total, 1.0)) + top, 0.0)


@triton.jit
def _entries(program, tokens, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    """Offsets of the matrices' entries, which of them exist, and which columns and rows."""
    row = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    out, into = tl.arange(0, SIDE)[None, :, None], tl.arange(0, SIDE)[None, None, :]
    at = row[:, None, None] * (N * N) + out * N + into
    return row, at, (row < tokens)[:, None, None] & (out < N) & (into < N), out < N, into < N


@triton.jit
def _forward_kernel(x, y, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    _, at, there, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    L = tl.where(is_row & is_column, tl.load(x + at, mask=there, other=0.0).to(tl.float32), -float("inf"))
    for _ in range(iterations):
        L -= _logsumexp(L, is_column, 1)
        L -= _logsumexp(L, is_row, 2)
    tl.store(y + at, tl.exp(L).to(y.dtype.element_ty), mask=there)


@triton.jit
def _backward_kernel(g, x, g_x, scratch, tokens, iterations, N: tl.constexpr, SIDE: tl.constexpr, TOKENS: tl.constexpr):
    row, at, there, is_row, is_column = _entries(tl.program_id(0), tokens, N, SIDE, TOKENS)
    side = tl.arange(0, SIDE)
    note = scratch + row[:, None] * (2 * N) + side[None, :]
    known = (row < tokens)[:, None] & (side < N)[None, :]
    L = tl.where(is_row & is_column, tl.load(x + at, mask=there, other=0.0).to(tl.float32), -float("inf"))
    for k in range(iterations):
        columns = _logsumexp(L, is_column, 1)
        L -= columns
        rows = _logsumexp(L, is_row, 2)
        L -= rows
        to = note + tl.cast(k, tl.int64) * tokens * (2 * N)
        tl.store(to, tl.reshape(columns, [TOKENS, SIDE]), mask=known)
        tl.store(to + N, tl.reshape(rows, [TOKENS, SIDE]), mask=known)
    tl.debug_barrier()
    d = tl.load(g + at, mask=there, other=0.0).to(tl.float32) * tl.exp(L)
    for turn in range(iterations):
        to = note + tl.cast(iterations - 1 - turn, tl.int64) * tokens * (2 * N)
        d -= tl.exp(L) * tl.expand_dims(tl.sum(d, 2), 2)
        L += tl.expand_dims(tl.load(to + N, mask=known, other=0.0), 2)
        d -= tl.exp(L) * tl.expand_dims(tl.sum(d, 1), 1)
        L += tl.expand_dims(tl.load(to, mask=known, other=0.0), 1)
    tl.store(g_x + at, d.to(g_x.dtype.element_ty), mask=there)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The operator's contract is the reference's."""
    result: Tensor = _forward(logits.contiguous(), iterations)
    return result


@torch.library.custom_op("residua::sinkhorn", mutates_args=())
def _forward(logits: Tensor, iterations: int) -> Tensor:
    y = torch.empty_like(logits)
    tokens, sizes = _sizes(logits)
    if tokens:
        _forward_kernel[(triton.cdiv(tokens, sizes["TOKENS"]),)](logits, y, tokens, iterations, **sizes)
    return y


@_forward.register_fake
def _(logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("residua::sinkhorn_backward", mutates_args=())
def _backward(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    g_logits = torch.empty_like(logits)
    tokens, sizes = _sizes(logits)
    scratch = logits.new_empty((iterations, tokens, 2 * sizes["N"]), dtype=torch.float32)
    if tokens:
        programs = (triton.cdiv(tokens, sizes["TOKENS"]),)
        _backward_kernel[programs](g.contiguous(), logits, g_logits, scratch, tokens, iterations, **sizes)
    return g_logits


@_backward.register_fake
def _(g: Tensor, logits: Tensor, iterations: int) -> Tensor:
    return torch.empty_like(logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logits, ctx.iterations = inputs
    ctx.save_for_backward(logits)


def _differentiate(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return _backward(g, *ctx.saved_tensors, ctx.iterations), None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(logits: Tensor) -> tuple[int, dict[str, int]]:
    n = logits.shape[-1]
    side = triton.next_power_of_2(n)
    return logits.shape[:-2].numel(), {"N": n, "SIDE": side, "TOKENS": max(1, TILE // side**2)}
