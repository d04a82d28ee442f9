"""Optimizer updates of many weights at once, in place.

A step of S took 223.6 ms with these updates, 232.9 without (docs/lab/kernels.md, "Gains of single parts", `residua
bench step mgr-s-prenorm --micro-batch 32 --accumulate 4`). AdamW's kernel is not measured alone.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.optimizer_update import launch, reference


def _serves(written: Sequence[Tensor], read: Sequence[Tensor], *_: Any) -> bool:
    """Tensors that are only read may have any layout: one such gradient must not send a whole group to PyTorch."""
    return supports(*written, *read) and all(map(_plain, written))


def _serves_adam(means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor], *_: Any) -> bool:
    alike = all(m.dtype == v.dtype for m, v in zip(means, squares, strict=True))
    return alike and _serves((*means, *squares), gradients)


def _plain(t: Tensor) -> bool:
    """Whether t is contiguous and its address is aligned for vector loads."""
    return t.is_contiguous() and not (t.is_cuda and t.data_ptr() % 16)


def _pair(d: Draw) -> list[Tensor]:
    return [d.w(40, 24), d.w(7)]


def _case(*args: Any) -> Cases:
    yield Case(args, gradients=False, in_place=0)


def _descents(d: Draw) -> Cases:
    return _case(_pair(d), [d.x(40, 24), d.x(7)], 0.1, 0.2)


momentum_directions = Operator(
    reference.momentum_directions,
    lambda d: _case(_pair(d), _pair(d), 0.9, torch.float32),
    launch.momentum_directions,
    _serves,
)
adam_directions = Operator(
    reference.adam_directions,
    lambda d: _case(_pair(d), [x.abs() for x in _pair(d)], _pair(d), (0.9, 0.95), 1e-3),
    launch.adam_directions,
    _serves_adam,
)
cautious_descent = Operator(reference.cautious_descent, _descents, launch.cautious_descent, _serves)
plain_descent = Operator(reference.plain_descent, _descents, launch.plain_descent, _serves)

__all__ = ["adam_directions", "cautious_descent", "momentum_directions", "plain_descent"]
