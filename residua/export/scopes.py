"""Which names of a piece of source are its own, and what the others stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from residua.export.sources import Meaning, Sources

Function = ast.FunctionDef | ast.Lambda


class Reference(NamedTuple):
    """A name, or a name with attributes, that stands for something defined elsewhere."""

    node: ast.Name | ast.Attribute
    meaning: Meaning
    annotation: bool
    """Whether it is only a type, which nothing evaluates."""
    local: frozenset[str]
    """The names that are taken where it stands."""


def references(
    module: str, node: ast.AST, sources: Sources, local: frozenset[str] = frozenset(), annotation: bool = False
) -> Iterator[Reference]:
    """Every reference in a tree to a definition of ours or of another package."""
    if isinstance(node, ast.Name | ast.Attribute) and _root(node) not in local:
        meaning = sources.reference(module, node)
        if meaning is not None:
            yield Reference(node, meaning, annotation, local)
            return
    if isinstance(node, Function):
        local = local | bound(node)
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        local = local | _stored(node)
    for field, value in ast.iter_fields(node):
        is_type = annotation or field in ("annotation", "returns")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from references(module, child, sources, local, is_type)


def bound(function: Function) -> frozenset[str]:
    """Names a function binds: arguments, variables, inner functions, imports of other packages."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    names = {a.arg for a in named if a is not None} | _stored(function)
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            names.add(node.name)
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not is_ours(node)):
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def is_ours(statement: ast.ImportFrom) -> bool:
    return (statement.module or "").split(".")[0] == "residua"


def _stored(node: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
