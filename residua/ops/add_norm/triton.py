"""Addition and RMSNorm, fused: read h and y, write s and x; backward: read both gradients and s, write one, 4C each."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from residua.ops import fused
from residua.ops.add_norm import kernels
from residua.ops.launch import on

# Persistent programs of the backward kernel per multiprocessor.
PROGRAMS = 8


def add_norm(h: Tensor, y: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The operator's contract is the reference's."""
    width = h.shape[-1]
    added, normed, _ = _forward(h.reshape(-1, width).contiguous(), y.reshape(-1, width).contiguous(), weight, eps)
    return added.reshape(h.shape), normed.reshape(h.shape)


@torch.library.custom_op("residua::add_norm", mutates_args=())
def _forward(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s and x [M, C], and rstd [M]."""
    added, normed, rstd = torch.empty_like(h), torch.empty_like(h), h.new_empty(h.shape[:1], dtype=torch.float32)
    tokens, sizes = len(h), _sizes(h.shape[1])
    if tokens:
        with on(h):
            kernels.forward_kernel[(triton.cdiv(tokens, sizes["ROWS"]),)](
                h, y, weight, added, normed, rstd, tokens, eps, **sizes
            )
    return added, normed, rstd


@_forward.register_fake
def _(h: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), torch.empty_like(h), h.new_empty(h.shape[:1], dtype=torch.float32)


@torch.library.custom_op("residua::add_norm_backward", mutates_args=())
def _backward(
    g_normed: Tensor, g_added: Tensor | None, added: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of s, which are those of h and of y, and of weight."""
    tokens, sizes = len(added), _sizes(added.shape[1])
    programs = min(triton.cdiv(tokens, sizes["ROWS"]), PROGRAMS * fused.multiprocessors(added))
    g, partial = torch.empty_like(added), added.new_empty((programs, added.shape[1]), dtype=torch.float32)
    if tokens:
        with on(added):
            kernels.backward_kernel[(programs,)](
                g_normed.contiguous(), g_normed if g_added is None else g_added.contiguous(), added, weight, rstd,
                g, partial, tokens, HAS_ADDED=g_added is not None, **sizes,
            )  # fmt: skip
    return g, partial.sum(0).to(weight.dtype)


@_backward.register_fake
def _(g_normed: Tensor, g_added: Tensor | None, added: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(added), torch.empty_like(weight)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    added, _, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(added, inputs[2], rstd)


def _differentiate(ctx: Any, g_added: Tensor | None, g_normed: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g_normed is None:
        return g_added, g_added, None, None
    g, g_weight = _backward(g_normed, g_added, *ctx.saved_tensors)
    return g, g, g_weight, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _sizes(width: int) -> dict[str, int]:
    """Four warps for four rows, for two wide ones or for one, and eight for a very wide one."""
    rows = max(1, 4096 // triton.next_power_of_2(max(width, 1024)))
    warps = 4 if width <= 4096 else 8
    block = 256 * warps // rows
    return {"C": width, "ROWS": rows, "BLOCK": block, "TILES": triton.cdiv(width, block), "num_warps": warps}
