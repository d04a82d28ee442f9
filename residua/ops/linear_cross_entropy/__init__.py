"""Projection onto the vocabulary and cross-entropy in one operator.

For 50,304 words at S it takes 14.1 ms and 0.92 GiB, Liger 19.1 ms and 0.26 GiB (docs/results/step.md, `residua bench
ops linear_cross_entropy --implementations fused`).
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.linear_cross_entropy import launch, reference


def _serves(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, **_: Any) -> bool:
    return softcap is None and supports(hidden, weight)


def _head(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Final states, the head's matrix, targets."""
    vocabulary = d.sizes.vocabulary
    return d.x(), d.linear(vocabulary, d.sizes.width), d.below(vocabulary, d.sizes.tokens)


linear_cross_entropy = Operator(
    reference.linear_cross_entropy, lambda d: [Case(_head(d), {"z_loss": 1e-4})], launch.linear_cross_entropy, _serves
)
# only loss + z has a correct gradient; here z is 0, so the loss has it
training_cross_entropy = Operator(
    reference.training_cross_entropy, lambda d: [Case(_head(d), only=0)], launch.training_cross_entropy, _serves
)
token_likelihoods = Operator(
    reference.token_likelihoods,
    lambda d: [Case(_head(d), gradients=False, only=0)],
    launch.token_likelihoods,
    _serves,
)
head_piece = Operator(reference.head_piece, lambda d: [Case(_head(d))], launch.head_piece, _serves)

__all__ = ["head_piece", "linear_cross_entropy", "token_likelihoods", "training_cross_entropy"]
