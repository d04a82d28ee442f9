"""Switch parts of a model off inside a `with` block. After it everything is as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def hooked(handles: Callable[[], list[RemovableHandle]]) -> Iterator[None]:
    """Attach hooks for the length of the block."""
    attached = handles()
    try:
        yield
    finally:
        for handle in attached:
            handle.remove()


def on_each(
    modules: Sequence[nn.Module], hook: Callable[..., Any], with_kwargs: bool = False
) -> Callable[[], list[RemovableHandle]]:
    """For `hooked`: attaches a forward hook to each of these modules."""
    return lambda: [module.register_forward_hook(hook, with_kwargs=with_kwargs) for module in modules]


def silenced(module: nn.Module, given: Any, output: Any) -> Any:
    """A forward hook that sets the module's main output to zero."""
    return replaced_first(output, torch.zeros_like)


def first(output: Any) -> Any:
    """A module's main output: itself, or the first of a tuple or list."""
    return output[0] if isinstance(output, tuple | list) and output else output


def replaced_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The output with its main tensor changed."""
    if isinstance(output, list):
        return [change(output[0]), *output[1:]]
    if isinstance(output, tuple):
        made = (change(output[0]), *output[1:])
        return type(output)(*made) if hasattr(output, "_fields") else made
    return change(output)
