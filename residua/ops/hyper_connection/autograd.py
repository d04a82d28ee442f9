"""Hyper-connections and Sinkhorn's normalisation, fused: operators and gradients.

A step stores X, y and X' for the backward pass; X' is the next step's X. Write weights store the logits.

With a gain, a step includes the norm after it. Only compiled code can see that nothing else reads h, so a rewrite
passes the norm's gain (`train/compile/rewrites/normed_junctions.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from residua.ops._runtime.library import differentiate, save_inputs
from residua.ops.hyper_connection import launch
from residua.ops.hyper_connection.reference import Norm


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
    """The fused twin of `reference.hyper_step`."""
    *lead, n, width = streams.shape
    flat, y = streams.reshape(-1, n, width).contiguous(), update.reshape(-1, width).contiguous()
    post, mix = post.expand(*lead, n).reshape(-1, n), mix.expand(*lead, n, n).reshape(-1, n * n)
    scale = bias.new_zeros(()) if scale is None else scale
    phi = bias.new_zeros((0, width)) if phi is None else phi.contiguous()
    after, hidden, logits, *_ = launch.step(flat, y.to(flat.dtype), post, mix, bias, scale, phi, norm, eps)
    shape = {"all": (*lead, len(phi)), "each": (*lead, n, len(phi)), "none": (*lead, 0)}[norm]
    return hidden.reshape(update.shape), after.reshape(streams.shape), logits.reshape(shape)


def single_pass_step(
    streams: Tensor, update: Tensor, post: Tensor, mix: Tensor, pre: Tensor, phi: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The fused twin of `reference.single_pass_step`."""
    *lead, n, width = streams.shape
    flat, y = streams.reshape(-1, n, width).contiguous(), update.reshape(-1, width).contiguous()
    post, mix = post.expand(*lead, n).reshape(-1, n), mix.expand(*lead, n, n).reshape(-1, n * n)
    pre = pre.expand(*lead, n).reshape(-1, n)
    after, hidden, logits, _ = launch.single_pass_step(flat, y.to(flat.dtype), post, mix, pre, phi.contiguous(), eps)
    return hidden.reshape(update.shape), after.reshape(streams.shape), logits.reshape(*lead, n, len(phi))


def manifold_weights(
    logits: Tensor, scale: Tensor, bias: Tensor, streams: int, iterations: int
) -> tuple[Tensor, Tensor]:
    """The fused twin of `reference.manifold_weights`."""
    return launch.write_weights(logits.contiguous(), scale.contiguous(), bias.contiguous(), streams, iterations)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The fused twin of `reference.sinkhorn`: the mix of write weights with these logits."""
    n = logits.shape[-1]
    padded = pad(logits.flatten(-2), (2 * n, 0))
    _, mix = manifold_weights(padded, padded.new_ones(3), padded.new_zeros(padded.shape[-1]), n, iterations)
    return mix.to(logits.dtype)


def _save_step(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.norm, _, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0], *output[2:5])


@differentiate(launch.step, _save_step)
def _differentiate_step(
    ctx: Any, g_after: Tensor | None, g_hidden: Tensor | None, g_logits: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    streams, update, post, mix, bias, scale, phi, after, logits, rstd, weights = ctx.saved_tensors
    g_hidden = torch.zeros_like(update) if g_hidden is None else g_hidden
    g_logits = None if ctx.norm == "none" else g_logits
    g_streams, g_update, g_post, g_mix, g_pre, g_z = launch.step_backward(
        g_hidden, g_after, g_logits, streams, update, post, mix, scale, phi, logits, rstd, weights, ctx.norm
    )[:6]
    g_scale, g_phi = None, None
    if ctx.norm != "none":
        scaled = logits[:, : len(bias)] if ctx.norm == "all" else torch.tanh(logits[:, :: len(phi)])
        g_scale = (g_pre * scaled).sum().to(scale.dtype)
        normed, dz = after.reshape(-1, phi.shape[1]), g_z.reshape(-1, len(phi))
        g_phi = launch.phi_gradient(dz, normed).to(phi.dtype)
    g_bias = g_pre.sum(0).to(bias.dtype)
    return g_streams, g_update, g_post.to(post.dtype), g_mix.to(mix.dtype), g_bias, g_scale, g_phi


def _save_single_pass(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _ = inputs
    after, _, logits, rstd = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, after, logits, rstd)


@differentiate(launch.single_pass_step, _save_single_pass)
def _differentiate_single_pass(
    ctx: Any, g_after: Tensor | None, g_hidden: Tensor | None, g_logits: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    *inputs, after, logits, rstd = ctx.saved_tensors
    _, update, post, mix, pre, phi = inputs
    g_hidden = torch.zeros_like(update) if g_hidden is None else g_hidden
    g_streams, g_update, g_post, g_mix, g_pre, g_z = launch.single_pass_backward(
        g_hidden, g_after, g_logits, *inputs, logits, rstd
    )
    g_phi = launch.phi_gradient(g_z.reshape(-1, len(phi)), after.reshape(-1, phi.shape[1])).to(phi.dtype)
    return g_streams, g_update, g_post.to(post.dtype), g_mix.to(mix.dtype), g_pre.to(pre.dtype), g_phi


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    save_inputs(ctx, inputs, output)


@differentiate(launch.write_weights, _save_weights)
def _differentiate_weights(ctx: Any, g_post: Tensor | None, g_mix: Tensor | None) -> tuple[Tensor, ...]:
    logits, scale, bias = ctx.saved_tensors
    g_logits, total = launch.weights_backward(g_post, g_mix, logits, scale, bias, *ctx.settings)
    g_scale, g_bias = total.split((len(scale), len(bias)))
    return g_logits, g_scale.to(scale.dtype), g_bias.to(bias.dtype)
