"""The feed-forwards of a mixture's experts, each on its own rows or on the tokens that visit it."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops._runtime.numeric import working_dtype
from residua.ops.expert_ffn import reference
from residua.ops.expert_ffn.reference import expert_hidden

ALIGNMENT = 8
"""Rows are read 16 bytes at a time: this many elements in bfloat16."""


def _serves(x: Tensor, up: Tensor, out: Tensor, ends: Tensor, activation: str, **_: Any) -> bool:
    whole = all(size % ALIGNMENT == 0 for size in out.shape[1:])
    return whole and len(x) > 0 and working_dtype(x) in fused.DTYPES and fused.serves(x, up, out)


expert_ffn = Operator(reference.expert_ffn)

if fused.INSTALLED:
    from residua.ops.expert_ffn import launch

    expert_ffn.register_fused(launch.expert_ffn, _serves)

__all__ = ["expert_ffn", "expert_hidden"]
