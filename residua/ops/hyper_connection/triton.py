"""Hyper-connections, fused: launching the kernels, and what autograd keeps.

Forward reads X and y and writes X' and h, (2N + 2)C a token; backward reads the gradients of X' and h, X and y, and
writes the gradients of X and y, (3N + 3)C; then X' once more for φ's gradient, a matrix product over tokens. A step
keeps X, y and X', which is the next step's X.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from residua.ops._runtime.launch import on
from residua.ops.hyper_connection import kernels
from residua.ops.hyper_connection.reference import Norm

# Tokens of a tile, channels of a block (half as many for more than 4 streams), warps: forward and backward.
FORWARD, BACKWARD = (32, 64, 4), (16, 64, 4)


def hyper_step(
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    bias: Tensor,
    *,
    scale: Tensor | None = None,
    phi: Tensor | None = None,
    norm: Norm = "none",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator's contract is the reference's."""
    *lead, n, width = streams.shape
    flat, y = streams.reshape(-1, n, width).contiguous(), update.reshape(-1, width).contiguous()
    post, mix = post.expand(*lead, n).reshape(-1, n), mix.expand(*lead, n, n).reshape(-1, n * n)
    scale = bias.new_zeros(()) if scale is None else scale
    phi = bias.new_zeros((0, width)) if phi is None else phi.contiguous()
    after, hidden, logits, *_ = _forward(flat, y.to(flat.dtype), post, mix, bias, scale, phi, norm, eps)
    shape = {"all": (*lead, len(phi)), "each": (*lead, n, len(phi)), "none": (*lead, 0)}[norm]
    return hidden.reshape(update.shape), after.reshape(streams.shape), logits.reshape(shape)


@torch.library.custom_op("residua::hyper_step", mutates_args=())
def _forward(
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    bias: Tensor,
    scale: Tensor,
    phi: Tensor,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """X' [M, N, C], h [M, C], z and the rstd of each of its numbers [M, Z], and pre [M, N]."""
    made = _outputs(streams, update, phi, norm)
    post, mix = _dense(post), _dense(mix)
    rounded = phi.to(streams.dtype)
    split = norm != "none" and rounded.dtype != phi.dtype
    rest = (phi - rounded).to(streams.dtype) if split else rounded
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *FORWARD)
    if tokens:
        with on(streams):
            kernels.forward_kernel[(triton.cdiv(tokens, sizes["TOKENS"]),)](
                streams, update, post, mix, scale, bias, rounded, rest, *made,
                tokens, post.stride(0), mix.stride(0), eps, SPLIT=split, **sizes,
            )  # fmt: skip
    return made


@_forward.register_fake
def _(
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    bias: Tensor,
    scale: Tensor,
    phi: Tensor,
    norm: str,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(streams, update, phi, norm)


@torch.library.custom_op("residua::hyper_step_backward", mutates_args=())
def _backward(
    g_hidden: Tensor,
    g_after: Tensor | None,
    g_logits: Tensor | None,
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    scale: Tensor,
    phi: Tensor,
    logits: Tensor,
    rstd: Tensor,
    weights: Tensor,
    norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of X and y; of post, mix and what makes pre, per token; and rstd · dz."""
    made = _gradients(streams, update, logits)
    post, mix = _dense(post), _dense(mix)
    phi = phi.to(streams.dtype)
    tokens, sizes = len(streams), _sizes(streams, phi, norm, *BACKWARD)
    if tokens:
        with on(streams):
            kernels.backward_kernel[(triton.cdiv(tokens, sizes["TOKENS"]),)](
                g_hidden if g_after is None else g_after.contiguous(), g_hidden.contiguous(),
                g_hidden if g_logits is None else g_logits.contiguous(),
                streams, update, post, mix, scale, phi, logits, rstd, weights, *made,
                tokens, post.stride(0), mix.stride(0), HAS_AFTER=g_after is not None, HAS_LOGITS=g_logits is not None,
                SQUARE=triton.next_power_of_2(streams.shape[1] * (streams.shape[1] + 1)),
                **sizes,
            )  # fmt: skip
    return made


@_backward.register_fake
def _(
    g_hidden: Tensor,
    g_after: Tensor | None,
    g_logits: Tensor | None,
    streams: Tensor,
    update: Tensor,
    post: Tensor,
    mix: Tensor,
    scale: Tensor,
    phi: Tensor,
    logits: Tensor,
    rstd: Tensor,
    weights: Tensor,
    norm: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _gradients(streams, update, logits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.norm, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0], *output[2:])


def _differentiate(
    ctx: Any, g_after: Tensor | None, g_hidden: Tensor | None, g_logits: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    streams, update, post, mix, bias, scale, phi, after, logits, rstd, weights = ctx.saved_tensors
    g_hidden = torch.zeros_like(update) if g_hidden is None else g_hidden
    g_logits = None if ctx.norm == "none" else g_logits
    inputs = (streams, update, post, mix, scale, phi, logits, rstd, weights)
    g_streams, g_update, g_post, g_mix, g_pre, g_z = _backward(g_hidden, g_after, g_logits, *inputs, ctx.norm)
    g_scale, g_phi = None, None
    if ctx.norm != "none":
        seen = logits[:, : len(bias)] if ctx.norm == "all" else torch.tanh(logits[:, :: len(phi)])
        g_scale = (g_pre * seen).sum().to(scale.dtype)
        normed, dz = after.reshape(-1, phi.shape[1]), g_z.reshape(-1, len(phi))
        g_phi = (dz.to(after.dtype).T @ normed).to(phi.dtype)
    return (
        g_streams, g_update, g_post.to(post.dtype), g_mix.to(mix.dtype), g_pre.sum(0).to(bias.dtype), g_scale, g_phi,
        None, None,
    )  # fmt: skip


_forward.register_autograd(_differentiate, setup_context=_save)


def _outputs(streams: Tensor, update: Tensor, phi: Tensor, norm: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits, rstd = (
        streams.new_empty((streams.shape[0], _numbers(streams, phi, norm)), dtype=torch.float32) for _ in "zr"
    )
    weights = streams.new_empty(streams.shape[:2], dtype=torch.float32)
    return torch.empty_like(streams), torch.empty_like(update), logits, rstd, weights


def _numbers(streams: Tensor, phi: Tensor, norm: str) -> int:
    """How many numbers z has for a token."""
    return len(phi) * {"all": 1, "each": streams.shape[1], "none": 0}[norm]


def _gradients(
    streams: Tensor, update: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, n, _ = streams.shape
    post, mix, pre = (streams.new_empty((tokens, size), dtype=torch.float32) for size in (n, n * n, n))
    return torch.empty_like(streams), torch.empty_like(update), post, mix, pre, torch.empty_like(logits)


def _dense(x: Tensor) -> Tensor:
    """Numbers of one token side by side; tokens may share them (stride 0)."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(streams: Tensor, phi: Tensor, norm: str, tokens: int, block: int, warps: int) -> dict[str, Any]:
    _, n, width = streams.shape
    numbers = _numbers(streams, phi, norm)
    return {
        "C": width,
        "N": n,
        "K": len(phi),
        "Z": numbers,
        "RANK": max(16, triton.next_power_of_2(numbers)),
        "TOKENS": tokens,
        "BLOCK": block if n <= 4 else block // 2,
        "NORM": norm,
        "num_warps": warps,
        "num_stages": 1,
    }
