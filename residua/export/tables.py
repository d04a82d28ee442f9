"""Generate `residua_config.py` of an export: the configuration tables as plain classes, without pydantic."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

from residua.config.settings import Frozen
from residua.export.modules import attributes

HEADER = '''"""The tables of the configuration, with their defaults and the methods that this model calls."""

from __future__ import annotations

{modules}from typing import {typing}

from .residua_plain import Table
'''


def tables_source(wanted: dict[str, Any], called: set[str]) -> str:
    """Write classes, functions and types of `residua.config` by name; classes get only the methods in `called`."""
    while True:
        tables = _Tables(set(called))
        for name, value in sorted(wanted.items()):
            tables.add(name, value)
        if tables.called == called:
            header = HEADER.format(modules="".join(tables.modules), typing=", ".join(sorted(tables.typing)))
            return "\n\n".join([header, *filter(None, ["".join(tables.values)]), *tables.definitions.values()])
        called = tables.called  # a written method calls another one


def has_tables(module: str) -> bool:
    """Return whether a module of `residua.config` defines tables."""
    values = vars(import_module(module)).values() if module.startswith("residua.config.") else ()
    return any(is_table(value) and value.__module__ == module for value in values)


def is_table(value: Any) -> bool:
    """Return whether this is a table class."""
    return isinstance(value, type) and issubclass(value, BaseModel)


class _Tables:
    """The source so far: classes and functions, each after its definition-time dependencies, and single values."""

    def __init__(self, called: set[str]) -> None:
        self.called, self.typing, self.names = called, {"Any"}, set[str]()
        self.definitions: dict[str, str] = {}
        self.modules: list[str] = []
        self.values: list[str] = []

    def add(self, name: str, value: Any) -> None:
        """Write the definition of `name` in a module of `residua.config`."""
        if name in self.names:
            return
        self.names.add(name)
        if getattr(value, "__module__", None) == "typing" and getattr(value, "__name__", None) == name:
            self.typing.add(name)
        elif isinstance(value, ModuleType):
            alias = "" if value.__name__ == name else f" as {name}"
            self.modules.append(f"import {value.__name__}{alias}\n")
        elif value is Frozen:
            self.values.append(f"{name} = Table\n")
        elif is_table(value):
            self.definitions[name] = self._class(value)
        elif isinstance(value, FunctionType | type):
            if isinstance(value, FunctionType):
                self._add_names(value)
            self.definitions[name] = inspect.getsource(value)
        elif isinstance(value, int | float | str):
            self.values.append(f"{name} = {value!r}\n")
        else:
            self.values.append(f"{name} = Any\n")  # a type for validating values

    def _class(self, table: type[BaseModel]) -> str:
        bases = [base for base in table.__bases__ if is_table(base)]
        for base in bases:
            if base is not Frozen:
                self.add(base.__name__, base)
        names = ", ".join("Table" if base is Frozen else base.__name__ for base in bases)
        parts = []
        if document := vars(table).get("__doc__"):
            text = inspect.cleandoc(document)
            parts.append(f'"""{text}\n"""' if "\n" in text else f'"""{text}"""')
        parts.append("\n".join(f"{key} = {_written(value)}" for key, value in self._defaults(table)))
        parts += [textwrap.dedent(inspect.getsource(method)).rstrip() for method in self._methods(table)]
        body = "\n\n".join(filter(None, parts)) or "pass"
        return f"class {table.__name__}({names}):\n{textwrap.indent(body, '    ')}\n"

    def _defaults(self, table: type[BaseModel]) -> Iterator[tuple[str, Any]]:
        """Yield the class variables in use, and the class's own fields that have a default."""
        annotations = vars(table).get("__annotations__", {})
        for name in annotations:
            if name in table.__class_vars__ and name in vars(table) and name in self.called:
                yield name, vars(table)[name]
            elif name in table.model_fields and not table.model_fields[name].is_required():
                value = table.model_fields[name].get_default(call_default_factory=True)
                if is_table(type(value)):
                    self.add(type(value).__name__, type(value))
                yield name, value

    def _methods(self, table: type[BaseModel]) -> Iterator[FunctionType]:
        """Yield the class's own methods and properties that are called."""
        for name, value in vars(table).items():
            method = value.fget if isinstance(value, property) else value
            method = method.func if isinstance(method, cached_property) else method
            if isinstance(method, FunctionType) and name in self.called and not name.startswith("_"):
                self._add_names(method)
                yield method

    def _add_names(self, function: FunctionType) -> None:
        """Add the names that a function uses from its module, and the methods that it calls."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        self.called |= attributes(tree)
        for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & function.__globals__.keys():
            self.add(name, function.__globals__[name])


def _written(value: Any) -> str:
    """Format a default as source code."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
