"""Substitutes in an exported folder for pydantic, kernels and parts that the model does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Table:
    """A table of the configuration: its keys as attributes, tables in it likewise, lists as tuples.

    A class attribute is a key's default. Values are not checked: Residua did that before it wrote the folder.
    """

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            TABLES[vars(cls)["kind"]] = cls

    def __init__(self, **keys: Any) -> None:
        for key, value in keys.items():
            setattr(self, key, self._plain(value))

    @classmethod
    def join(cls, *tables: type[Table]) -> None:
        """Residua adds tables to a family of choices; here every table is known by its kind."""

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, dict):
            return TABLES.get(value.get("kind"), Table)(**value)
        return tuple(Table._plain(v) for v in value) if isinstance(value, list) else value


TABLES: dict[Any, type[Table]] = {}
"""Tables by their `kind`."""


def Field(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **_: Any) -> Any:
    """pydantic's Field without its checks: the default."""
    return default if default_factory is None else default_factory()


def field_validator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """pydantic's decorators of checks, which are not run."""
    return lambda check: check


model_validator = field_validator


class Unused:
    """Stands for a part of Residua that this model does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this part of Residua is not in the exported model: install Residua to use it.")


class NoKernels:
    """Stands for a module of kernels: asked whether it serves some tensors, it says no."""

    def __getattr__(self, name: str) -> NoKernels:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


no_kernels = NoKernels()
