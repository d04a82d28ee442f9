"""Delta rules: linear attention with a decaying state that each token corrects instead of only adding to it.

`gated_delta` decays per head, `kimi_delta` per channel; `delta_mixer` is the former with its convolution and output
gate.
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.delta_rule import autograd, mixer
from residua.ops.delta_rule.reference import step
from residua.ops.delta_rule.rules import gated_delta, gated_delta_step, gates, kimi_delta, takes
from residua.ops.short_convolution import MOST_TAPS


def _mixers(d: Draw) -> Cases:
    width, (decay, share) = d.sizes.head_dim, gates(d)
    projected, convolution = d.x(*d.sizes.batch, 6 * width), d.w(4, 4 * width)
    yield Case((projected, decay[..., :2], share[..., :2], convolution, d.w(width), 1), only=0)


def _serves_mixer(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, key_heads: int, **_: Any
) -> bool:
    """Whether all three kernels support these tensors."""
    width = gain.shape[0]
    return convolution.shape[0] <= MOST_TAPS and takes(projected, width, width) and supports(convolution, gain)


delta_mixer = Operator(mixer.delta_mixer, _mixers, autograd.delta_mixer, _serves_mixer, compile_seconds=11)

__all__ = ["delta_mixer", "gated_delta", "gated_delta_step", "kimi_delta", "step"]
