"""Projection onto the vocabulary and cross-entropy in one operator."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.linear_cross_entropy import autograd, launch, reference

linear_cross_entropy = Operator(reference.linear_cross_entropy)
training_cross_entropy = Operator(reference.training_cross_entropy)


def _serves(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> bool:
    return fused.serves(hidden, weight)


linear_cross_entropy.register_fused(autograd.linear_cross_entropy, _serves)
training_cross_entropy.register_fused(autograd.training_cross_entropy, _serves)

token_likelihoods = Operator(reference.token_likelihoods)
token_likelihoods.register_fused(launch.token_likelihoods, _serves)

head_piece = Operator(reference.head_piece)
head_piece.register_fused(autograd.head_piece, _serves)

__all__ = ["head_piece", "linear_cross_entropy", "token_likelihoods", "training_cross_entropy"]
