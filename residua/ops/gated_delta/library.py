"""The gated delta rule by flash-linear-attention's chunked kernels: when the package can be used, and how it is called.

Not a `launch.py`: the kernels are the package's, and so are their plans. The backward pass runs the package's forward
again and then its backward, so only the inputs are kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from residua.ops._runtime.numeric import constant

INSTALLED = find_spec("fla") is not None and find_spec("triton") is not None
WIDEST_HEAD = 256


def takes(k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these inputs. The package fails to import without a GPU, so it is imported late."""
    fits = INSTALLED and v.is_cuda and v.dtype is torch.bfloat16 and max(k.shape[-1], v.shape[-1]) <= WIDEST_HEAD
    return fits and (not torch.is_grad_enabled() or _can_train(v.device))


@constant
def _can_train(device: torch.device) -> bool:
    """Whether the package's backward pass runs: it refuses to where Triton is known to compile it wrongly."""
    return compiles_backward(
        triton_version(), torch.cuda.get_device_capability(device), find_spec("tilelang") is not None
    )


def compiles_backward(triton: tuple[int, ...], capability: tuple[int, int], tilelang: bool) -> bool:
    """Triton 3.4.0 to 3.7.0 get it wrong on Hopper (flash-linear-attention issue 640), where tilelang can stand in."""
    return tilelang or capability[0] != 9 or not (3, 4, 0) <= triton < (3, 7, 1)


def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


@cache
def _kernels() -> Callable[..., tuple[Tensor, Tensor]]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rule: Callable[..., tuple[Tensor, Tensor]] = chunk_gated_delta_rule
    return rule


def _run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    o, last = _kernels()(q, k, v, g, beta, scale=1.0, initial_state=state, output_final_state=True)
    assert o.dtype is v.dtype and last.dtype is torch.float32  # a cast here would be lost to autograd
    return o, last


def forward_outputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape)


def forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        o, last = _run(q, k, v, g, beta, state)
    return o.contiguous(), last.contiguous()  # compiled code is written for the strides below


def backward_outputs(
    d_o: Tensor, d_last: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta, dstate = (x.new_empty(x.shape) for x in (q, k, v, g, beta, state))
    return dq, dk, dv, dg, dbeta, dstate


def backward(
    d_o: Tensor, d_last: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v, g, beta, state)]
    with torch.enable_grad():
        outputs = _run(*inputs)
    found = torch.autograd.grad(outputs, inputs, (d_o, d_last))
    dq, dk, dv, dg, dbeta, dstate = (gradient.contiguous() for gradient in found)
    return dq, dk, dv, dg, dbeta, dstate
