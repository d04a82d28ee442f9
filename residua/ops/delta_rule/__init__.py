"""Delta rules: linear attention with a decaying state that is corrected, not only added to.

`gated_delta` decays by head, `kimi_delta` by channel; `delta_mixer` is the former with what surrounds it in a layer.
"""

from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.delta_rule import reference
from residua.ops.delta_rule.reference import step
from residua.ops.short_convolution import MOST_TAPS

HEAD_WIDTHS = (16, 32, 64, 128)
WIDEST_CHANNEL_HEAD = 256

gated_delta = Operator(reference.gated_delta)
gated_delta_step = Operator(reference.step)
kimi_delta = Operator(reference.kimi_delta)

from residua.ops.delta_rule import mixer  # noqa: E402  (it calls `gated_delta`)

delta_mixer = Operator(mixer.delta_mixer)


def _takes(x: Tensor, key_width: int, value_width: int) -> bool:
    """Whether the kernels take such heads: of few widths, in bfloat16; in float32 only in the interpreter.

    On a GPU float32 needs more shared memory than there is.
    """
    fits = key_width in HEAD_WIDTHS and value_width in HEAD_WIDTHS and x.numel() > 0
    return fits and fused.serves(x) and (x.dtype is torch.bfloat16 or not x.is_cuda)


def _serves_gated(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Tensor | None) -> bool:
    return _takes(v, k.shape[-1], v.shape[-1])


def _serves_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> bool:
    """Also in float32, where no gradient is wanted; one decay per head."""
    fits = k.shape[-1] in HEAD_WIDTHS and v.shape[-1] in HEAD_WIDTHS and v.numel() > 0 and g.dim() == beta.dim()
    return fits and fused.serves(v) and not torch.is_grad_enabled()


def _serves_kimi(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **_: Any) -> bool:
    return k.shape[-1] <= WIDEST_CHANNEL_HEAD and fused.serves(q, k, v, *rest)


def _serves_mixer(
    projected: Tensor, g: Tensor, beta: Tensor, convolution: Tensor, gain: Tensor, key_heads: int, **_: Any
) -> bool:
    """What all three kernels take."""
    width = gain.shape[0]
    return convolution.shape[0] <= MOST_TAPS and _takes(projected, width, width) and fused.serves(convolution, gain)


if fused.INSTALLED:
    from residua.ops.delta_rule import autograd

    gated_delta.register_fused(autograd.gated_delta, _serves_gated)
    gated_delta_step.register_fused(autograd.step, _serves_step)
    kimi_delta.register_fused(autograd.kimi_delta, _serves_kimi)
    delta_mixer.register_fused(autograd.delta_mixer, _serves_mixer)

__all__ = ["delta_mixer", "gated_delta", "gated_delta_step", "kimi_delta", "step"]
