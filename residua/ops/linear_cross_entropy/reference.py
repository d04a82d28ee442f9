"""The head's projection and the cross-entropy, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from residua.ops._runtime.numeric import soft_cap, wide


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the head's logits, and the z-term separately.

        logits = hidden weightᵀ,   loss = mean(lse − logit_target),   z = z_loss · mean(lse²)

    hidden [..., C], weight [V, C], targets [...] int. Both means run over targets other than `ignore_index`, and are 0
    without any. With a cap, logits become softcap · tanh(logits / softcap). Returns two scalars in at least float32:
    the cross-entropy without the z-term, and the z-term.
    """
    logits = soft_cap(wide(linear(hidden, weight.to(hidden.dtype))), softcap)
    lse = logits.logsumexp(-1)
    counted = targets != ignore_index
    picked = logits.gather(-1, targets.where(counted, 0)[..., None]).squeeze(-1)
    count = counted.sum().clamp(min=1)
    loss = (lse - picked).where(counted, 0).sum() / count
    return loss, z_loss * lse.square().where(counted, 0).sum() / count


def token_likelihoods(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """log p [N] of targets [N] after final states [N, C], in at least float32, and whether each is the most likely
    token.

    weight [V, C] is the head's. Has no gradient.
    """
    logits = soft_cap(wide(linear(hidden, weight.to(hidden.dtype))), softcap)
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0], logits.argmax(-1) == targets


def training_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` for minimising loss + z: only the gradient of the sum is correct, not of either alone.

    This lets an implementation compute the gradients in the forward pass and store no probabilities.
    """
    return linear_cross_entropy(hidden, weight, targets, z_loss=z_loss, ignore_index=ignore_index, softcap=softcap)


def head_piece(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """The contribution of some rows of a head, weight [R, C], to the loss of hidden [N, C], at least in float32.

        logits = hidden weightᵀ,   lse = log Σ exp logits,   picked = the logit of the target, if it is in these rows

    targets [N] are relative to the first row; those below 0 or at least R belong to other rows.
    """
    logits = soft_cap(wide(linear(hidden, weight.to(hidden.dtype))), softcap)
    inside = (targets >= 0) & (targets < len(weight))
    picked = logits.gather(-1, targets.where(inside, 0)[:, None]).squeeze(-1)
    return logits.logsumexp(-1), picked.where(inside, 0)
