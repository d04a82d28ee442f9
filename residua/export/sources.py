"""Residua's own source files: what is defined where, and what a name in one of them stands for."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import residua
from residua.export.edits import Text


class Definition(NamedTuple):
    """A function, class or constant at the top of one of our modules."""

    module: str
    name: str


class Module(NamedTuple):
    """One of our modules, as a name that stands for it."""

    module: str


class External(NamedTuple):
    """Something of another package: `from module import name`, or `import module` where there is no name."""

    module: str
    name: str | None


Meaning = Definition | Module | External | None


TABLE = Definition("residua.export.plain", "Table")
FROZEN = Definition("residua.config.settings", "Frozen")


class Sources:
    """Modules by name, read when first asked for; `texts` may be rewritten while their tree is being cut down."""

    def __init__(self) -> None:
        self.texts: dict[str, Text] = {}
        self._names: dict[str, dict[str, Meaning]] = {}

    def text(self, module: str) -> Text:
        if module not in self.texts:
            self.texts[module] = _written(module)
        return self.texts[module]

    def statements(self, module: str) -> dict[str, ast.stmt]:
        """The definitions at the top of a module, by name."""
        return self.text(module).definitions

    def meaning(self, module: str, name: str) -> Meaning:
        """What a global name of a module stands for, followed to where it is defined; None for a builtin."""
        if module not in self._names:
            self._names[module] = self._bindings(module)
        found = self._names[module].get(name)
        if isinstance(found, External) and found.name and found.module.split(".")[0] == "residua":
            found = self._member(found.module, found.name, asking=module)
        elif isinstance(found, Definition):
            found = self._plain_path(found) or found
        return TABLE if found == FROZEN or (found is None and name == "Table") else found

    def reference(self, module: str, node: ast.AST) -> Meaning:
        """What `name` or `name.attribute…` stands for, as far as it leads through our modules."""
        if isinstance(node, ast.Name):
            return self.meaning(module, node.id)
        if not isinstance(node, ast.Attribute):
            return None
        base = self.reference(module, node.value)
        if isinstance(base, Module):
            return self._member(base.module, node.attr, asking=module)
        if isinstance(base, Definition) and node.attr == "reference" and base.module.startswith("residua.ops"):
            return base  # an operator's plain path is what its name already stands for here
        return None

    def _bindings(self, module: str) -> dict[str, Meaning]:
        """A module's global names: its imports, anywhere in it, and its definitions."""
        found: dict[str, Meaning] = {}
        for statement in ast.walk(self.text(module).tree):
            if isinstance(statement, ast.Import):
                found |= {alias.asname or alias.name: External(alias.name, None) for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module not in (None, "__future__"):
                home = str(statement.module)
                found |= {alias.asname or alias.name: External(home, alias.name) for alias in statement.names}
        return found | {name: Definition(module, name) for name in self.statements(module)}

    def _member(self, module: str, name: str, asking: str) -> Meaning:
        """`name` of one of our modules: a submodule, or what it defines or imports.

        `residua.ops.multi_gate` is a folder and an operator: only inside the folder is the folder meant.
        """
        inner = Module(f"{module}.{name}") if _path(f"{module}.{name}") else None
        return inner if module == asking else self.meaning(module, name) or inner

    def _plain_path(self, definition: Definition) -> Meaning:
        """`name = Operator(reference.function)` stands for the function: there are no kernels in an export."""
        statement = self.statements(definition.module)[definition.name]
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            return None
        made = statement.value
        if not isinstance(made.func, ast.Name) or made.func.id != "Operator":
            return None
        return self.reference(definition.module, made.args[0])


@cache
def _written(module: str) -> Text:
    path = _path(module)
    assert path is not None, module
    return Text(path.read_text(encoding="utf-8"))


@cache
def _path(module: str) -> Path | None:
    """The file of one of our modules."""
    place = Path(residua.__file__).parent.joinpath(*module.split(".")[1:])
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


def path_in_package(module: str) -> str:
    path = _path(module)
    assert path is not None
    return path.relative_to(Path(residua.__file__).parents[1]).as_posix()
