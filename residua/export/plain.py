"""Stand-ins in an exported folder for pydantic, kernels, and parts that the model does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Table:
    """A configuration table: its keys and nested tables as attributes, lists as tuples.

    A class attribute is a key's default. Values are not validated: Residua did so before writing the folder.
    """

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            TABLES[vars(cls)["kind"]] = cls

    def __init__(self, **keys: Any) -> None:
        for key, value in keys.items():
            setattr(self, key, self._plain(value))

    @classmethod
    def join(cls, *tables: type[Table]) -> None:
        """Do nothing: in Residua, this adds tables to a family of choices; here, tables are found by their kind."""

    @staticmethod
    def _plain(value: Any) -> Any:
        if isinstance(value, dict):
            return TABLES.get(value.get("kind"), Table)(**value)
        return tuple(Table._plain(v) for v in value) if isinstance(value, list) else value


TABLES: dict[Any, type[Table]] = {}
"""Tables by their `kind`."""


def Field(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **_: Any) -> Any:
    """pydantic's Field without validation: return the default."""
    return default if default_factory is None else default_factory()


def field_validator(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """pydantic's decorators for validators, which are not run here."""
    return lambda check: check


model_validator = field_validator


class Unused:
    """Stands in for a part of Residua that this model does not have."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this part of Residua is not in the exported model: install Residua to use it.")


class NoKernels:
    """Stands in for a module of kernels: it supports no tensors."""

    def __getattr__(self, name: str) -> NoKernels:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> bool:
        return False


no_kernels = NoKernels()
