"""Optimizer updates of many weights at once, in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case
from residua.ops._runtime.triton_support import INSTALLED, supports
from residua.ops.optimizer_update import reference

momentum_directions = Operator(
    reference.momentum_directions,
    lambda d: [Case(([d.w(40, 24), d.w(7)], [d.w(40, 24), d.w(7)], 0.9, torch.float32), gradients=False, in_place=0)],
)
adam_directions = Operator(
    reference.adam_directions,
    lambda d: [
        Case(
            ([d.w(40, 24), d.w(7)], [d.w(40, 24).abs(), d.w(7).abs()], [d.w(40, 24), d.w(7)], (0.9, 0.95), 1e-3),
            gradients=False,
            in_place=0,
        )
    ],
)
cautious_descent = Operator(
    reference.cautious_descent,
    lambda d: [Case(([d.w(40, 24), d.w(7)], [d.x(40, 24), d.x(7)], 0.1, 0.2), gradients=False, in_place=0)],
)
plain_descent = Operator(
    reference.plain_descent,
    lambda d: [Case(([d.w(40, 24), d.w(7)], [d.x(40, 24), d.x(7)], 0.1, 0.2), gradients=False, in_place=0)],
)

if INSTALLED:
    from residua.ops.optimizer_update import launch

    def _serves(tensors: Sequence[Tensor], others: Sequence[Tensor], *_: Any) -> bool:
        return supports(*tensors, *others) and all(_plain(t) for t in (*tensors, *others))

    def _serves_adam(means: Sequence[Tensor], squares: Sequence[Tensor], gradients: Sequence[Tensor], *_: Any) -> bool:
        alike = all(m.dtype == v.dtype for m, v in zip(means, squares, strict=True))
        return alike and _serves(means, (*squares, *gradients))

    def _plain(t: Tensor) -> bool:
        """Whether t is contiguous and its address is aligned for vector loads."""
        return t.is_contiguous() and not (t.is_cuda and t.data_ptr() % 16)

    momentum_directions.register_fused(launch.momentum_directions, _serves)
    adam_directions.register_fused(launch.adam_directions, _serves_adam)
    cautious_descent.register_fused(launch.cautious_descent, _serves)
    plain_descent.register_fused(launch.plain_descent, _serves)

__all__ = ["adam_directions", "cautious_descent", "momentum_directions", "plain_descent"]
