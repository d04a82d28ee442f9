"""The head's projection and the cross-entropy without float32 logits in memory.

With p = softmax(logits), g and g_z the gradients that reach the loss and the z-term, and count the counted targets, the
gradient of a token's logits is  c·p − (g/count)·onehot(target),  c = (g + 2·z_loss·lse·g_z)/count.  So the forward
pass leaves p where the logits were, in the compute dtype, and the backward pass is two matrix products with p: c scales
rows of their other operands, and the target's entry of p is replaced by p_target − g/(count·c), computed from the
saved float32 scalars. That is exact for any g and g_z, and costs no arithmetic beyond the three products.

Where p would take more than KEPT_BYTES it is not kept: the backward pass makes it again, some tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.numeric import wide

KEPT_BYTES = 4 * 2**30
CHUNK_BYTES = 512 * 2**20
# Stands for a coefficient of exactly 0, where the target's entry would otherwise be divided by it.
TINY = 1e-20


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, z_loss: float = 0.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """The operator's contract is the reference's; the logits exist in hidden's dtype only (autocast's, inside it)."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    rows, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    cast = weight.detach().to(hidden.dtype)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = wanted and rows.shape[0] * weight.shape[0] * hidden.element_size() <= KEPT_BYTES
    loss, z, *_ = _forward(rows, weight, cast, flat_targets, z_loss, ignore_index, keep)
    return loss, z


@torch.library.custom_op("residua::linear_cross_entropy", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, z_loss: float, ignore_index: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss, z, lse [N], −log p(target) [N], and the probabilities [N, V], or with `keep` off none of them ([0, V]).

    `weight` is there for its gradient; `cast` is the same matrix in hidden's dtype.
    """
    kept = hidden.new_empty((hidden.shape[0] if keep else 0, cast.shape[0]))
    if keep:
        lse, nll = _softmax_(torch.mm(hidden, cast.t(), out=kept), targets, ignore_index, True)
    else:
        parts = [
            _softmax_(torch.mm(hidden[rows], cast.t()), targets[rows], ignore_index, False)
            for rows in _chunks(hidden.shape[0], cast)
        ]
        lse, nll = (torch.cat(part) for part in zip(*parts, strict=True))
    counted = targets != ignore_index
    count = counted.sum().clamp(min=1)
    return nll.sum() / count, z_loss * lse.square().where(counted, 0).sum() / count, lse, nll, kept


@_forward.register_fake
def _(
    hidden: Tensor, weight: Tensor, cast: Tensor, targets: Tensor, z_loss: float, ignore_index: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    single = torch.promote_types(hidden.dtype, torch.float32)
    loss, z = (hidden.new_empty((), dtype=single) for _ in range(2))
    lse, nll = (hidden.new_empty(hidden.shape[:1], dtype=single) for _ in range(2))
    return loss, z, lse, nll, hidden.new_empty((hidden.shape[0] if keep else 0, cast.shape[0]))


@torch.library.custom_op("residua::linear_cross_entropy_backward", mutates_args=())
def _backward(
    g_loss: Tensor,
    g_z: Tensor,
    hidden: Tensor,
    cast: Tensor,
    targets: Tensor,
    lse: Tensor,
    nll: Tensor,
    kept: Tensor,
    z_loss: float,
    ignore_index: int,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden [N, C] and of weight [V, C]."""
    counted = (targets != ignore_index)[:, None]
    count = counted.sum().clamp(min=1)
    share = g_loss / count
    scale = share + 2 * z_loss * g_z * lse[:, None] / count
    scale = torch.where(scale == 0, TINY, scale)
    entry = (torch.exp(-nll[:, None]) - share / scale).to(hidden.dtype)
    scale, target = torch.where(counted, scale, 0), torch.where(counted, targets[:, None], 0)

    if kept.shape[0] == hidden.shape[0]:
        return _products(kept, hidden, cast, scale, entry, target, weight_dtype)
    g_hidden = torch.empty_like(hidden)
    g_weight = torch.zeros(cast.shape, dtype=weight_dtype, device=cast.device)
    for rows in _chunks(hidden.shape[0], cast):
        p = torch.mm(hidden[rows], cast.t())
        _softmax_(p, targets[rows], ignore_index, True)
        g_hidden[rows], g = _products(p, hidden[rows], cast, scale[rows], entry[rows], target[rows], weight_dtype)
        g_weight += g
    return g_hidden, g_weight


@_backward.register_fake
def _(
    g_loss: Tensor,
    g_z: Tensor,
    hidden: Tensor,
    cast: Tensor,
    targets: Tensor,
    lse: Tensor,
    nll: Tensor,
    kept: Tensor,
    z_loss: float,
    ignore_index: int,
    weight_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(cast, dtype=weight_dtype)


def _products(
    p: Tensor, hidden: Tensor, cast: Tensor, scale: Tensor, entry: Tensor, target: Tensor, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """scale·(p·W) and pᵀ·(scale·hidden), the target's entry of each row of p being `entry`."""
    # Through .data, past autograd's count of changes: each backward pass writes these entries anew before it uses them.
    p.data.scatter_(1, target, entry)
    g_hidden = torch.mm(p, cast).mul_(scale)
    scaled = torch.mul(hidden, scale, out=torch.empty_like(hidden))
    if p.is_cuda and weight_dtype != p.dtype:
        return g_hidden, torch.mm(p.t(), scaled, out_dtype=weight_dtype)
    return g_hidden, torch.mm(p.t(), scaled).to(weight_dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, cast, targets, ctx.z_loss, ctx.ignore_index, _ = inputs
    ctx.weight_dtype = weight.dtype
    ctx.save_for_backward(hidden, cast, targets, *output[2:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g_loss: Tensor | None, g_z: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    hidden, cast, targets, lse, nll, kept = ctx.saved_tensors
    g_loss, g_z = (lse.new_zeros(()) if g is None else g for g in (g_loss, g_z))
    saved = (hidden, cast, targets, lse, nll, kept)
    g_hidden, g_weight = _backward(g_loss, g_z, *saved, ctx.z_loss, ctx.ignore_index, ctx.weight_dtype)
    return g_hidden, g_weight, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)


def _chunks(tokens: int, cast: Tensor) -> list[slice]:
    """Runs of tokens whose logits take about CHUNK_BYTES; one empty run for no tokens."""
    size = max(1, CHUNK_BYTES // (cast.shape[0] * cast.element_size()))
    return [slice(start, start + size) for start in range(0, max(tokens, 1), size)]


def _softmax_(logits: Tensor, targets: Tensor, ignore_index: int, write: bool) -> tuple[Tensor, Tensor]:
    if fused.serves(logits):
        from residua.ops.linear_cross_entropy import triton

        return triton.softmax_(logits, targets, ignore_index, write)
    return plain_softmax_(logits, targets, ignore_index, write)


def plain_softmax_(logits: Tensor, targets: Tensor, ignore_index: int, write: bool) -> tuple[Tensor, Tensor]:
    """The kernel's work in plain PyTorch: lse and −log p(target); with `write` the logits become probabilities."""
    values = wide(logits)
    lse = values.logsumexp(-1)
    counted = targets != ignore_index
    picked = values.gather(1, targets.where(counted, 0)[:, None]).squeeze(1)
    if write:
        logits.copy_(torch.exp(values - lse[:, None]))
    return lse, (lse - picked).where(counted, 0)
