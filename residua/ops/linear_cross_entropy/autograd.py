"""The head's projection and the cross-entropy without float32 logits in memory.

With p = softmax(logits), g and g_z the gradients that reach the loss and the z-term, and count the counted targets, the
gradient of a token's logits is  c·p − (g/count)·onehot(target),  c = (g + 2·z_loss·lse·g_z)/count.

If g = g_z, as where loss + z is minimised, c = g·w/count with w = 1 + 2·z_loss·lse, and the forward pass knows all of
it but g. So it multiplies p by both matrices at once, some tokens at a time, and keeps p·W [N, C] and pᵀ·(w·hidden)
[V, C] instead of p [N, V]; the target's entry of p is less 1/w. The backward pass scales them.

That g and g_z are equal is known without looking at their values, which are on the GPU: they are one tensor, or z_loss
is 0. If they are not, the backward pass of `linear_cross_entropy` computes p again, some tokens at a time: c scales
rows of the products' other operands, and the target's entry is p_target − g/(count·c). `training_cross_entropy` is told
that they are equal, and keeps nothing for that case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.library import differentiate
from residua.ops.linear_cross_entropy import launch

PIECE_BYTES = 2**30


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference; logits exist only in hidden's dtype (under autocast, in autocast's)."""
    return _both(launch.forward, hidden, weight, targets, z_loss, ignore_index)


def training_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference: the loss carries the gradient of loss + z, and z none."""
    return _both(launch.training_forward, hidden, weight, targets, z_loss, ignore_index)


def _both(
    operator: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float, ignore_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, cast, flat_targets, wanted = _prepared(hidden, weight, targets)
    if not wanted:
        loss, z = launch.value(rows, cast, flat_targets, z_loss, ignore_index)
    else:
        loss, z, *_ = operator(rows, weight, cast, flat_targets, z_loss, ignore_index)
    return loss, z


def head_piece(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The fused twin of the reference; a softmax of more than PIECE_BYTES is computed again in the backward pass."""
    rows, cast, flat_targets, wanted = _prepared(hidden, weight, targets)
    keep = wanted and rows.shape[0] * weight.shape[0] * rows.element_size() <= PIECE_BYTES
    lse, picked, _ = launch.piece(rows, weight, cast, flat_targets, keep)
    return lse, picked


def _prepared(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Rows and the matrix in the dtype of the products, targets, and whether anyone wants a gradient."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return hidden.reshape(-1, hidden.shape[-1]), weight.detach().to(hidden.dtype), targets.reshape(-1), wanted


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, targets, ctx.z_loss, ctx.ignore_index = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(targets, *output[2:], *((hidden, weight) if ctx.z_loss else ()))
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, g_loss: Tensor | None, g_z: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_second(others)
    if g_loss is None and g_z is None:
        return (None,) * 6
    targets, lse, p_weight, p_hidden, *again = ctx.saved_tensors
    g_loss, g_z = (lse.new_zeros(()) if g is None else g for g in (g_loss, g_z))
    if ctx.z_loss == 0 or g_loss is g_z:
        return *_scaled(ctx, g_loss, targets, lse, p_weight, p_hidden), None, None, None, None
    hidden, weight = again
    saved = (hidden, weight.to(hidden.dtype), targets, ctx.z_loss, ctx.ignore_index, ctx.weight_dtype)
    return *launch.backward(g_loss, g_z, *saved), None, None, None, None


def _refuse_second(gradients: Sequence[Tensor | None]) -> None:
    """Only a second derivative reaches what is kept for the backward pass."""
    if any(g is not None for g in gradients):
        raise RuntimeError(
            "the fused cross-entropy has no second derivative: compute it inside residua.ops.backend('reference')."
        )


differentiate(launch.forward, _differentiate, _save)


def _save_trained(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, weight, _, targets, ctx.z_loss, ctx.ignore_index = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(targets, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate_trained(
    ctx: Any, g: Tensor | None, _: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_second(others)
    if g is None:
        return (None,) * 6
    return *_scaled(ctx, g, *ctx.saved_tensors), None, None, None, None


def _scaled(
    ctx: Any, g: Tensor, targets: Tensor, lse: Tensor, p_weight: Tensor, p_hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden and of weight where g reaches both losses."""
    counted = targets != ctx.ignore_index
    share = g / counted.sum().clamp(min=1)
    scale = launch.coefficients(lse, counted, ctx.z_loss) * share
    # in the products' dtype, so that compiled code reads and writes half the bytes
    g_hidden = (p_weight * scale[:, None]).to(p_weight.dtype)
    return g_hidden, (p_hidden * share).to(ctx.weight_dtype)


differentiate(launch.training_forward, _differentiate_trained, _save_trained)


def _save_piece(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, cast, targets, _ = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(hidden, cast, targets, *output)


def _differentiate_piece(ctx: Any, g_lse: Tensor, g_picked: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    g_hidden, g_weight = launch.piece_backward(g_lse, g_picked, *ctx.saved_tensors, ctx.weight_dtype)
    return g_hidden, g_weight, None, None, None


differentiate(launch.piece, _differentiate_piece, _save_piece)
