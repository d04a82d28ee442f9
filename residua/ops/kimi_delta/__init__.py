"""The delta rule with a decay per channel: the linear attention of Kimi Linear."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.kimi_delta import reference
from residua.ops.kimi_delta.reference import step

WIDEST_HEAD = 256

kimi_delta = Operator(reference.chunked)
kimi_delta.__name__ = "kimi_delta"


def _serves(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **_: Any) -> bool:
    return k.shape[-1] <= WIDEST_HEAD and fused.serves(q, k, v, *rest)


if fused.INSTALLED:
    from residua.ops.kimi_delta import autograd

    kimi_delta.register_fused(autograd.kimi_delta, _serves)

__all__ = ["kimi_delta", "step"]
