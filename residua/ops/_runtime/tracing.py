"""`torch.compiler.allow_in_graph` for our functions, without importing `torch._dynamo` before something is compiled.

Torch's own decorator imports it, which takes seconds, and most commands compile nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TypeVar

import torch

DYNAMO = "torch._dynamo"
F = TypeVar("F", bound=Callable[..., Any])

_waiting: list[Callable[..., Any]] = []


def in_graph(function: F) -> F:
    """Make the function one opaque node of compiled graphs; it is registered when Dynamo is imported."""
    if DYNAMO in sys.modules:
        return torch.compiler.allow_in_graph(function)  # type: ignore[no-any-return, no-untyped-call]
    _waiting.append(function)
    return function


def opaque(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The `apply` of an autograd function as one opaque node of compiled graphs."""

    def apply(*args: Any) -> Any:
        return function.apply(*args)

    return in_graph(apply)


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
