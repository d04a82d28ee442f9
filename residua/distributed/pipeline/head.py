"""The head of a pipeline in pieces: each stage multiplies with some rows of the vocabulary and hands on two numbers.

With the logits ℓ_v = w_v·h of the rows in a piece, a stage adds to what it received, for every token,

    lse ← log(exp(lse) + Σ_v exp ℓ_v),     picked ← picked + ℓ_target, if the target is one of its rows,

and the last one computes the loss, mean(lse − picked), and the z-term from them. Gradients take the same way back.
"""

from __future__ import annotations

from torch import Tensor

from residua.data.loader import IGNORED
from residua.ops.linear_cross_entropy import head_piece


def piece_of_head(hidden: Tensor, weight: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """lse and picked of one piece, [...] each, at least in float32.

    hidden [..., C], weight [R, C] (rows `start` … of the head), targets [...].
    """
    lse, picked = head_piece(hidden.flatten(0, -2), weight, (targets - start).flatten())
    return lse.view(targets.shape), picked.view(targets.shape)


def losses_of(lse: Tensor, picked: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy and z-term, as `ops.linear_cross_entropy` returns them."""
    counted = targets != IGNORED
    count = counted.sum().clamp(min=1)
    loss = (lse - picked).where(counted, 0).sum() / count
    return loss, z_loss * lse.square().where(counted, 0).sum() / count
