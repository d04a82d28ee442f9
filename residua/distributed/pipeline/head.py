"""The head of a pipeline in pieces: each stage multiplies with some rows of the vocabulary and hands on two numbers.

With the logits ℓ_v = w_v·h of the rows in a piece, a stage adds to what it received, for every token,

    lse ← log(exp(lse) + Σ_v exp ℓ_v),     picked ← picked + ℓ_target, if the target is one of its rows,

and the last one computes the loss, mean(lse − picked), and the z-term from them. Gradients take the same way back.
Logits are made for `TOKENS` tokens at a time, and again in the backward pass, so they are never kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from residua.data.loader import IGNORED
from residua.ops._runtime.numeric import wide

TOKENS = 4096
"""Tokens whose logits exist at the same time."""


def piece_of_head(hidden: Tensor, weight: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """log Σ exp of the logits of some rows, and the target's logit if it is among them, else 0.

    hidden [..., C], weight [R, C] (rows `start` … of the head), targets [...]. Returns two tensors [...], at least
    float32.
    """
    local = (targets - start).flatten()
    inside = (local >= 0) & (local < len(weight))
    lse, picked = _Piece.apply(hidden.flatten(0, -2), weight, local.where(inside, 0), inside)
    return lse.view(targets.shape), picked.view(targets.shape)


def losses_of(lse: Tensor, picked: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-term, as `ops.linear_cross_entropy` returns them."""
    counted = targets != IGNORED
    count = counted.sum().clamp(min=1)
    loss = (lse - picked).where(counted, 0).sum() / count
    return loss, z_loss * lse.square().where(counted, 0).sum() / count


class _Piece(torch.autograd.Function):
    """hidden [N, C], weight [R, C], targets [N] (0 where outside), inside [N] → lse [N], picked [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        rounded, found = weight.to(hidden.dtype), []
        for h, target, own in _chunks(hidden, targets, inside):
            logits = wide(linear(h, rounded))
            picked = logits.gather(-1, target[:, None]).squeeze(-1).where(own, 0)
            found.append((logits.logsumexp(-1), picked))
        lse, picked = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, inside, lse)
        return lse, picked

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_lse: Tensor, of_picked: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, targets, inside, lse = ctx.saved_tensors
        rounded, of_weight, of_hidden = weight.to(hidden.dtype), torch.zeros_like(weight), []
        for h, target, own, sums, g, p in _chunks(hidden, targets, inside, lse, of_lse, of_picked):
            # dℓ = softmax · dlse + 1[v = target] · dpicked
            logits = wide(linear(h, rounded))
            of_logits = (logits - sums[:, None]).exp() * g[:, None]
            of_logits.scatter_add_(-1, target[:, None], p.where(own, 0)[:, None])
            narrow = of_logits.to(h.dtype)
            of_hidden.append(narrow @ rounded)
            of_weight += narrow.T @ h
        return torch.cat(of_hidden), of_weight, None, None


def _chunks(*tensors: Tensor) -> Any:
    return zip(*(tensor.split(TOKENS) for tensor in tensors), strict=True)
