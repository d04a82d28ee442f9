"""GatedNorm, fused: launching the kernels, and what autograd keeps (x, one float and R more per token)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from residua.ops import fused
from residua.ops.gated_norm import kernels

TOKENS, BLOCK, WARPS, STAGES = 64, 64, 4, 2
# Persistent programs of the backward kernel per multiprocessor.
PROGRAMS = 2


def gated_norm(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, eps: float = 1e-6, **_: str) -> Tensor:
    """The operator's contract is the reference's; `_serves` has seen to it that the gate is a sigmoid per channel."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out, *_kept = _forward(rows, weight, down.contiguous(), up.contiguous(), eps)
    return out.reshape(x.shape)


@torch.library.custom_op("residua::gated_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gated rows [M, C], rstd [M] and u [M, R]."""
    tokens = x.shape[0]
    out = torch.empty_like(x)
    rstd = x.new_empty((tokens,), dtype=torch.float32)
    bottleneck = x.new_empty((tokens, down.shape[0]), dtype=torch.float32)
    if tokens:
        kernels.forward_kernel[(triton.cdiv(tokens, TOKENS),)](
            x, weight, down, up, out, rstd, bottleneck, tokens, eps, **_sizes(down)
        )
    return out, rstd, bottleneck


@_forward.register_fake
def _(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:1], dtype=torch.float32)
    return torch.empty_like(x), rstd, x.new_empty((x.shape[0], down.shape[0]), dtype=torch.float32)


@torch.library.custom_op("residua::gated_norm_backward", mutates_args=())
def _backward(
    g: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, rstd: Tensor, bottleneck: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of weight, down and up transposed in one matrix [1 + 2R, C] of float32."""
    tokens, width = x.shape
    tiles = triton.cdiv(tokens, TOKENS)
    programs = min(tiles, PROGRAMS * fused.multiprocessors(x))
    g_x = torch.empty_like(x)
    partial = torch.zeros((programs, 1 + 2 * down.shape[0], width), dtype=torch.float32, device=x.device)
    if tokens:
        kernels.backward_kernel[(programs,)](
            g.contiguous(), x, weight, down, up, rstd, bottleneck, g_x, partial, tokens, **_sizes(down)
        )
    total = partial.sum(0)
    total[1:] *= weight
    return g_x, total


@_backward.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, rstd: Tensor, bottleneck: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), rstd.new_empty((1 + 2 * down.shape[0], x.shape[1]))


def _sizes(down: Tensor) -> dict[str, int]:
    rank, width = down.shape
    return {
        "C": width,
        "R": rank,
        "RANK": max(16, triton.next_power_of_2(rank)),
        "TOKENS": TOKENS,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
        "num_stages": STAGES,
    }


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, down, up, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, down, up, *output[1:])


def _differentiate(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return None, None, None, None, None
    x, weight, down, up, rstd, bottleneck = ctx.saved_tensors
    g_x, rest = _backward(g, x, weight, down, up, rstd, bottleneck)
    g_weight, g_down, g_up = rest.split([1, *[down.shape[0]] * 2])
    return g_x, g_weight.squeeze(0).to(weight.dtype), g_down.to(down.dtype), g_up.t().to(up.dtype), None


_forward.register_autograd(_differentiate, setup_context=_save)
