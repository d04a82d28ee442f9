"""GatedNorm: RMSNorm and a low-rank gate on its own output."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.gated_norm import reference
from residua.ops.gated_norm.reference import low_rank_gate

HIGHEST_RANK = 64


def _fused(*args: Any, **settings: Any) -> Any:
    from residua.ops.gated_norm.autograd import gated_norm

    return gated_norm(*args, **settings)


def _serves(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, activation: str = "sigmoid", **_: Any) -> bool:
    """One sigmoid per channel, and a low rank."""
    per_channel = up.shape[0] == x.shape[-1] and activation == "sigmoid"
    return per_channel and down.shape[0] <= HIGHEST_RANK and fused.serves(x, weight, down, up)


gated_norm = Operator(reference.gated_norm)
gated_norm.register_fused(_fused, _serves)

__all__ = ["gated_norm", "low_rank_gate"]
