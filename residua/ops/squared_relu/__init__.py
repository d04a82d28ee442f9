"""The feed-forward with relu(·)² between its two maps, fused into the maps' products."""

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.numeric import constant, working_dtype
from residua.ops._runtime.triton_support import INTERPRETED, supports
from residua.ops.squared_relu import launch, reference

FEWEST_TOKENS = 2048
"""With fewer tokens, a library's matrix product and a pass over its small result take no longer than our kernel."""
ALIGNMENT = 8
"""Tensor descriptors need rows of a multiple of this many elements, 16 bytes."""


def _pays(x: Tensor, w_in: Tensor) -> bool:
    """Whether the kernels are faster: many tokens and 16-bit products on a GPU with the instructions; in the
    interpreter, float32.
    """
    kernel_dtype = torch.float32 if INTERPRETED else torch.bfloat16
    hidden, width = w_in.shape
    return (
        working_dtype(x) is kernel_dtype
        and x.numel() >= FEWEST_TOKENS * width
        and width % ALIGNMENT == hidden % ALIGNMENT == 0
        and (not x.is_cuda or _is_hopper())
    )


@constant
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def _serves(x: Tensor, w_in: Tensor, w_out: Tensor) -> bool:
    return supports(x, w_in, w_out)


def _cases(d: Draw) -> Cases:
    width = d.sizes.width
    args = (d.x(FEWEST_TOKENS, width), d.matrix(512, width), d.matrix(width, 512))
    yield Case(args, note="; its kernel needs Hopper")


def _fused(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    run = launch.squared_relu_ffn if _pays(x, w_in) else reference.squared_relu_ffn
    return run(x, w_in, w_out)


squared_relu_ffn = Operator(reference.squared_relu_ffn, _cases, _fused, _serves, compile_seconds=3)

__all__ = ["squared_relu_ffn"]
