"""Functions with gradients, as single nodes of compiled graphs.

`torch.compiler.allow_in_graph` imports `torch._dynamo`, which takes seconds, and most commands compile nothing. So our
functions are registered when something else imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice, zip_longest
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

DYNAMO = "torch._dynamo"
P = ParamSpec("P")
R = TypeVar("R")

_waiting: list[Callable[..., Any]] = []


def differentiable(
    backward: Callable[..., Sequence[Any]],
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[P, R]]:
    """Give a function a gradient, and make it one opaque node of compiled graphs.

    Function and gradient get autograd's context first. Arguments are passed by position and may be lists, whose lengths
    are in `ctx.lengths`. `backward` returns a gradient for each argument: None for any without one, a list for a list
    of tensors. It may leave out those at the end.
    """

    def decorate(function: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        def forward(ctx: Any, lengths: list[int | None], *flat: Any) -> R:
            ctx.lengths = lengths
            return function(ctx, *grouped(flat, lengths))  # type: ignore[call-arg]

        @once_differentiable  # type: ignore[untyped-decorator]
        def differentiate(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            flat: list[Any] = []
            for n, g in zip_longest(ctx.lengths, backward(ctx, *gradients)):
                flat += [g] if n is None else [None] * n if g is None else g
            return None, *flat

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        node: Any = type(function.__name__, (torch.autograd.Function,), methods)

        def apply(*args: P.args, **keywords: P.kwargs) -> R:
            if keywords:
                raise TypeError(f"{function.__name__} takes arguments by position, not {', '.join(keywords)} by name")
            lengths: list[int | None] = []
            flat: list[Any] = []
            for value in args:
                if isinstance(value, (list, tuple)):  # `list | tuple` would be built in every call
                    lengths.append(len(value))
                    flat.extend(value)
                else:
                    lengths.append(None)
                    flat.append(value)
            result: R = node.apply(lengths, *flat)
            return result

        return _in_graph(apply)

    return decorate


def grouped(flat: Iterable[Any], lengths: Iterable[int | None]) -> list[Any]:
    """Values and lists of values, from all of them in one row; None is a single value."""
    values = iter(flat)
    return [next(values) if n is None else list(islice(values, n)) for n in lengths]


def _in_graph(function: Callable[P, R]) -> Callable[P, R]:
    if DYNAMO in sys.modules:
        return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return, no-untyped-call]
    _waiting.append(function)
    return function


class _Watch(MetaPathFinder):
    """Detects any import of Dynamo and, once it is loaded, registers the waiting functions."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == DYNAMO else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                while _waiting:
                    torch.compiler.allow_in_graph(_waiting.pop())  # type: ignore[no-untyped-call]

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if DYNAMO not in sys.modules:
    sys.meta_path.insert(0, _Watch())
