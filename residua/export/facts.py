"""What a configuration settles about the code: which tables there are, and what an expression over them can be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, get_args

from residua.config import choices
from residua.config.model import ModelConfig
from residua.config.settings import Frozen
from residua.export.sources import Definition, Sources

Values = list[Any] | None
"""Everything an expression can be, or None where that is not known."""

Names = dict[str, Values]


class Facts:
    """One configuration, asked by the source that is to run it."""

    def __init__(self, config: ModelConfig, sources: Sources) -> None:
        self.tables = list(_tables(config))
        self.sources = sources

    def classes(self, module: str, node: ast.AST | None) -> tuple[type[Frozen], ...]:
        """The kinds of table that an annotation or an argument of isinstance names."""
        if isinstance(node, ast.BinOp):
            return (*self.classes(module, node.left), *self.classes(module, node.right))
        if isinstance(node, ast.Tuple):
            return tuple(c for element in node.elts for c in self.classes(module, element))
        meaning = self.sources.reference(module, node) if node is not None else None
        if meaning == Definition("residua.config.model", "ModelConfig"):
            return (ModelConfig,)
        if isinstance(meaning, Definition) and meaning.module == "residua.config.choices":
            return _members(getattr(choices, meaning.name))
        return ()

    def used(self, kinds: tuple[type[Frozen], ...]) -> list[Frozen]:
        return [t for t in self.tables if isinstance(t, kinds)]

    def names(self, module: str, function: ast.FunctionDef) -> Names:
        """What a function's arguments and variables can be, by their annotations and assignments."""
        names: Names = {}
        for argument in (*function.args.args, *function.args.kwonlyargs):
            kinds = self.classes(module, argument.annotation)
            names[argument.arg] = list(self.used(kinds)) if kinds else None
        for statement in ast.walk(function):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                for name, value in _pairs(statement.targets[0], statement.value):
                    known = self.values(value, names) if value is not None else None
                    names[name] = None if name in names else known
        return names

    def values(self, node: ast.expr, names: Names) -> Values:
        """All that an expression can be: names of tables and what they hold, strings, None."""
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            owners = self.values(node.value, names)
            known = owners and all(hasattr(o, node.attr) for o in owners)
            return [getattr(o, node.attr) for o in owners] if owners and known else None
        return None

    def is_instance(self, module: str, call: ast.Call, names: Names) -> str | None:
        """`isinstance(table, kinds)` as True, False or a comparison of kinds; None where it is about something else."""
        subject, kinds = call.args[0], self.classes(module, call.args[1])
        if not kinds:
            return None
        possible = self.values(subject, names)
        if possible is None:
            possible = list(self.used(_relatives(kinds)))
        answers = {isinstance(p, kinds) for p in possible}
        if len(answers) == 1:
            return str(answers.pop())
        named = sorted({kind_of(type(p)) for p in possible if isinstance(p, kinds)})
        return (
            f'{ast.unparse(subject)}.kind == "{named[0]}"'
            if len(named) == 1
            else f"{ast.unparse(subject)}.kind in {tuple(named)}"
        )


def kind_of(table: type[Frozen]) -> str:
    return str(table.model_fields["kind"].default)


def _tables(value: Any) -> Iterator[Frozen]:
    if isinstance(value, Frozen):
        yield value
        for field in type(value).model_fields:
            yield from _tables(getattr(value, field))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _tables(element)


def _members(annotation: Any) -> tuple[type[Frozen], ...]:
    if isinstance(annotation, type):
        return (annotation,) if issubclass(annotation, Frozen) else ()
    return tuple(c for argument in get_args(annotation) for c in _members(argument))


def _relatives(kinds: tuple[type[Frozen], ...]) -> tuple[type[Frozen], ...]:
    """Every table that may stand where one of `kinds` may: the members of the unions they are in."""
    unions = [_members(u) for u in vars(choices).values() if not isinstance(u, type) and _members(u)]
    shared = [c for union in unions if any(issubclass(c, kinds) for c in union) for c in union]
    return tuple(shared) or kinds


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and what is assigned to them; None where it cannot be told apart."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple):
        parts = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
        for i, element in enumerate(target.elts):
            if isinstance(element, ast.Name):
                yield element.id, parts[i] if parts else None
