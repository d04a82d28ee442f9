"""The gated delta rule: linear attention with a decaying state that is corrected, not only added to."""

import torch
from torch import Tensor

from residua.ops._runtime import fused
from residua.ops._runtime.backend import Operator
from residua.ops.gated_delta import reference

HEAD_WIDTHS = (16, 32, 64, 128)

gated_delta = Operator(reference.chunked)
gated_delta.__name__ = "gated_delta"
step = Operator(reference.step)


def takes(x: Tensor, key_width: int, value_width: int) -> bool:
    """Whether the kernels take such heads: of few widths, in bfloat16; in float32 only in the interpreter.

    On a GPU float32 needs more shared memory than there is.
    """
    fits = key_width in HEAD_WIDTHS and value_width in HEAD_WIDTHS and x.numel() > 0
    return fits and fused.serves(x) and (x.dtype is torch.bfloat16 or not x.is_cuda)


def _serves(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Tensor | None) -> bool:
    return takes(v, k.shape[-1], v.shape[-1])


def _serves_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> bool:
    """Also in float32, where no gradient is wanted."""
    fits = k.shape[-1] in HEAD_WIDTHS and v.shape[-1] in HEAD_WIDTHS and v.numel() > 0
    return fits and fused.serves(v) and not torch.is_grad_enabled()


if fused.INSTALLED:
    from residua.ops.gated_delta import autograd

    gated_delta.register_fused(autograd.gated_delta, _serves)
    step.register_fused(autograd.step, _serves_step)

__all__ = ["gated_delta", "step", "takes"]
