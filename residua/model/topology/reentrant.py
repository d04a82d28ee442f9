"""Refuses reentrant checkpoints that lose the gradient of a topology's state.

`torch.utils.checkpoint` with `use_reentrant=True` follows the tensors that it is given and that it returns, but none
inside a tuple: to autograd those are constants. A state that comes out in a tuple would train wrongly without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from residua.errors import UserError

_FORWARD = CheckpointFunction.forward.__code__
_MADE_IN = "_residua_made_in"


def keeps_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """`open` or `step`, which raises an error if a reentrant checkpoint cuts its tensors off."""

    @wraps(method)
    def call(self: Any, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *given, **options)
        tensors = [t for item in given for t in (item if isinstance(item, tuple) else (item,)) if isinstance(t, Tensor)]
        frame = reentrant_checkpoint(tensors)
        made_in = None if frame is None else id(frame.f_locals["ctx"])
        followed = () if frame is None else frame.f_locals["args"]
        if any(_is_cut_off(tensor, made_in, followed) for tensor in tensors):
            raise UserError(
                "the state of a topology goes through a reentrant checkpoint in a tuple, where it gets no gradient: "
                "pass and return its tensors one by one, or use use_reentrant=False (docs/use-in-your-model.md)."
            )
        made = method(self, *given, **options)
        if made_in is not None:
            for tensor in made[1]:
                if all(tensor is not old for old in tensors):
                    setattr(tensor, _MADE_IN, made_in)
        return made

    return call


def reentrant_checkpoint(tensors: Sequence[Tensor]) -> FrameType | None:
    """The reentrant checkpoint whose forward pass this is, which has gradients off; None if there is none."""
    if torch.is_grad_enabled() or not any(tensor.requires_grad or hasattr(tensor, _MADE_IN) for tensor in tensors):
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _FORWARD:
        frame = frame.f_back
    return frame


def _is_cut_off(tensor: Tensor, made_in: int | None, followed: Sequence[Any]) -> bool:
    """Whether it came into this checkpoint, or out of another, without being followed."""
    if tensor.requires_grad:
        return made_in is not None and not tensor.is_leaf and all(tensor is not other for other in followed)
    return tensor.is_floating_point() and getattr(tensor, _MADE_IN, made_in) != made_in
