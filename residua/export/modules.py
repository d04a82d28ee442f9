"""The exporter's view of Python modules: their source, their imports, and where a name is defined."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from residua.errors import UserError
from residua.ops._runtime.backend import Operator


def source(module: str) -> str:
    """Return the text of a module's file, without importing the module, which may need transformers."""
    path = _file(module)
    if module == "__main__" or path is None or path.suffix != ".py":
        raise UserError(f"module {module} cannot be exported: define the model's classes in an importable .py file.")
    return path.read_text(encoding="utf-8")


def _file(module: str) -> Path | None:
    """Find the file of a module, which need not be imported."""
    loaded = sys.modules.get(module)
    spec = find_spec(module) if loaded is None else None
    path = spec.origin if spec else getattr(loaded, "__file__", None)
    return None if path is None else Path(path)


def is_package(module: str) -> bool:
    """Return whether a module is the `__init__.py` of a folder."""
    path = _file(module)
    return path is not None and path.name == "__init__.py"


class Parsed(NamedTuple):
    """The imports in a module's text, and every `x` in its `something.x`."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    attributes: frozenset[str]


@cache
def parsed(text: str) -> Parsed:
    """Parse a text and cache the facts that are needed repeatedly, without its large tree."""
    tree = ast.parse(text)
    imports = tuple(node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return Parsed(imports, frozenset(attributes(tree)))


def is_users(module: str) -> bool:
    """Return whether a module is the user's own: a `.py` file outside installed packages and Python itself."""
    top = module.split(".")[0]
    if top in sys.stdlib_module_names or top in _installed():
        return False
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as a running script
        return False
    return spec is not None and str(spec.origin).endswith(".py")


@cache
def _installed() -> frozenset[str]:
    return frozenset(packages_distributions())


def member(module: str, name: str) -> Any:
    """Return the value of `from module import name`, or an operator's plain PyTorch; may raise ImportError."""
    home = import_module(module)
    value = getattr(home, name) if hasattr(home, name) else import_module(f"{module}.{name}")
    return value.reference if isinstance(value, Operator) else value


def imported_from(module: str, statement: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a `from … import`, relative or not."""
    package = module if is_package(module) else module.rpartition(".")[0]
    return resolve_name("." * statement.level + (statement.module or ""), package)


def origin(module: str, name: str) -> tuple[str, str]:
    """Find the module that defines the object of `from module import name`, and its name there."""
    value = member(module, name)
    home, own_name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if isinstance(home, str) and isinstance(own_name, str) and getattr(sys.modules.get(home), own_name, None) is value:
        return home, own_name
    # constants and type aliases do not know their module: follow the imports
    for statement in parsed(source(module)).imports:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if name == (alias.asname or alias.name):
                    return origin(imported_from(module, statement), alias.name)
    return module, name


def attributes(tree: ast.AST) -> set[str]:
    """Collect every `x` in `something.x`, except Python's own `__x__`."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in names if not name.startswith("__")}


def defines_parts(module: str) -> bool:
    """Return whether a module defines classes used in models."""
    values = vars(import_module(module)).values()
    return any(isinstance(v, type) and issubclass(v, nn.Module) and v.__module__ == module for v in values)


@cache
def needs(module: str, package: str) -> bool:
    """Return whether a module imports `package`, directly or through other Residua modules."""
    modules, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name.split(".")[0] == package:
            return True
        if name.startswith("residua.") and name not in modules:
            modules.add(name)
            waiting += _imports(name)
    return False


def _imports(module: str) -> Iterator[str]:
    """Yield the modules that a module imports; for names from Residua modules, those that define them."""
    for statement in parsed(source(module)).imports:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        else:
            home = imported_from(module, statement)
            if home.split(".")[0] != "residua":
                yield home
                continue
            for alias in statement.names:
                value = member(home, alias.name)
                yield value.__name__ if isinstance(value, ModuleType) else origin(home, alias.name)[0]
