"""Where Triton kernels can run, and which tensors the fused paths support."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from residua.ops._runtime.backend import chosen_backend

DTYPES = (torch.float32, torch.bfloat16)
INSTALLED = find_spec("triton") is not None and torch.version.hip is None
"""Whether kernels are available. AMD's PyTorch also has CUDA's names and Triton, but our kernels are untested there."""
# Triton's interpreter runs kernels in Python on a CPU, thousands of times slower; only for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOPPER_SHARED_MEMORY = 232_448
"""Most bytes per program."""


class Gpu(NamedTuple):
    multiprocessors: int
    shared_memory: int
    """Most bytes per program."""


absent: Gpu | None = None
"""The GPU to compile for in a process that launches no kernels (`AbsentGPU` of `train/compile/precompile.py`)."""


def supports(*tensors: Tensor) -> bool:
    """Whether the fused path supports these tensors: all on a GPU, float32 or bfloat16, with Triton installed.

    It supports CPU tensors only in the interpreter or for an absent GPU, and only under `backend("triton")`. Inside
    `torch.func.jvp` it supports none: kernels have no forward-mode derivative, so autograd would treat some results as
    constants.
    """
    if not INSTALLED or forward_ad._current_level >= 0:
        return False
    forced = (INTERPRETED or absent is not None) and chosen_backend() == "triton"
    return all((x.is_cuda or forced) and x.dtype in DTYPES for x in tensors)


def multiprocessors(x: Tensor) -> int:
    """The number of multiprocessors of the tensor's GPU; 3 in the interpreter, so that programs share work in tests."""
    if x.is_cuda:
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return 3 if absent is None else absent.multiprocessors


def shared_memory(x: Tensor) -> int:
    """Most bytes of shared memory per program on the tensor's GPU; without one, Hopper's."""
    if x.is_cuda:
        return int(getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 0))
    return HOPPER_SHARED_MEMORY if absent is None else absent.shared_memory
