"""Where Triton kernels can run, and which tensors the fused paths take."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from residua.ops._runtime.backend import chosen_backend

DTYPES = (torch.float32, torch.bfloat16)
INSTALLED = find_spec("triton") is not None
# Triton's interpreter runs kernels in Python on a CPU: for tests, thousands of times slower.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def serves(*tensors: Tensor) -> bool:
    """Whether the fused path takes these tensors: all on a GPU, float32 or bfloat16, with Triton installed.

    On a CPU it takes them only in the interpreter, and only if `backend("triton")` asks for it. Inside `torch.func.jvp`
    it takes none: kernels have no forward-mode derivative, and what some return would count as constant.
    """
    if not INSTALLED or forward_ad._current_level >= 0:
        return False
    asked = INTERPRETED and chosen_backend() == "triton"
    return all((x.is_cuda or asked) and x.dtype in DTYPES for x in tensors)


def multiprocessors(x: Tensor) -> int:
    """How many multiprocessors the tensor's GPU has. The interpreter gets 3, so that tests have programs share work."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def shared_memory(x: Tensor) -> int:
    """Most bytes of shared memory per program on the tensor's GPU; without one, Hopper's."""
    if not x.is_cuda:
        return 232_448
    return int(getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 0))
