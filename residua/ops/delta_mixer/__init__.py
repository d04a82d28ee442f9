"""Gated DeltaNet between its projections: convolution, delta rule, output norm and gate."""

from typing import Any

from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.delta_mixer import reference
from residua.ops.gated_delta import takes
from residua.ops.short_convolution import MOST_TAPS

delta_mixer = Operator(reference.delta_mixer)


def _serves(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, key_heads: int, **_: Any
) -> bool:
    """What all three kernels take."""
    width = gain.shape[0]
    return convolution.shape[0] <= MOST_TAPS and takes(projected, width, width) and fused.serves(convolution, gain)


if fused.INSTALLED:
    from residua.ops.delta_mixer import autograd

    delta_mixer.register_fused(autograd.delta_mixer, _serves)

__all__ = ["delta_mixer"]
