"""The gated delta rule: linear attention with a decaying state that is corrected, not only added to."""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops.gated_delta import autograd, library, reference
from residua.ops.gated_delta.reference import begins, step

gated_delta = Operator(reference.chunked)
gated_delta.__name__ = "gated_delta"


def _serves(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Any) -> bool:
    return library.takes(k, v)


gated_delta.register_fused(autograd.gated_delta, _serves)

__all__ = ["begins", "gated_delta", "step"]
