"""The delta rules as operators; `__init__.py` adds the mixer, which calls one of them."""

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.delta_rule import autograd, reference

HEAD_WIDTHS = (16, 32, 64, 128)


def _heads(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys of unit length, and values."""
    q, k = (torch.nn.functional.normalize(d.heads().float(), dim=-1).to(d.dtype) for _ in range(2))
    return q, k, d.heads()


def gates(d: Draw) -> tuple[Tensor, Tensor]:
    """A log decay and a write strength for each head and token."""
    shape = (*d.sizes.batch, d.sizes.heads)
    return -d.w(*shape).exp() / 8, d.w(*shape).sigmoid()


def _gated(d: Draw) -> Cases:
    yield Case((*_heads(d), *gates(d)), only=0, moved=(4, 7))


def _steps(d: Draw) -> Cases:
    one = [x[:, 0] for x in (*_heads(d), *gates(d))]
    state = d.w(len(one[0]), d.sizes.heads, d.sizes.head_dim, d.sizes.head_dim)
    yield Case((*one, state), gradients=False)


def _by_channel(d: Draw) -> Cases:
    decay = -d.w(*d.sizes.batch, d.sizes.heads, d.sizes.head_dim).exp() / 8
    yield Case((*_heads(d), decay, gates(d)[1]), only=0, moved=(6, 11))


def takes(x: Tensor, key_width: int, value_width: int) -> bool:
    """Whether the kernels support these heads: a few widths, in bfloat16; in float32 only in the interpreter.

    On a GPU, float32 would need too much shared memory.
    """
    fits = key_width in HEAD_WIDTHS and value_width in HEAD_WIDTHS and x.numel() > 0
    return fits and supports(x) and (x.dtype is torch.bfloat16 or not x.is_cuda)


def _serves(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **__: Tensor | None) -> bool:
    return takes(v, k.shape[-1], v.shape[-1])


def _serves_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None) -> bool:
    """Supports one decay per head, without a gradient; also float32."""
    fits = k.shape[-1] in HEAD_WIDTHS and v.shape[-1] in HEAD_WIDTHS and v.numel() > 0 and g.dim() == beta.dim()
    return fits and supports(v) and not torch.is_grad_enabled()


gated_delta = Operator(reference.gated_delta, _gated, autograd.gated_delta, _serves, compile_seconds=10)
gated_delta_step = Operator(reference.step, _steps, autograd.step, _serves_step)
kimi_delta = Operator(reference.kimi_delta, _by_channel, autograd.kimi_delta, _serves, compile_seconds=6)
