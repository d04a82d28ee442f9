"""One file out of many: the definitions a model needs, in an order that runs, under names that do not clash."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator

from residua.export.edits import Edit, Text
from residua.export.facts import kind_of
from residua.export.reachability import CHOICES, Reach
from residua.export.scopes import Reference, is_ours, references
from residua.export.sources import TABLE, Definition, External, path_in_package

_FOR_LINTERS = re.compile(r"  # (noqa|type: ignore).*")

CONFIGURATION_FILE = "configuration_residua"


class Emitter:
    """Writes what `reach` holds as one module."""

    def __init__(self, reach: Reach) -> None:
        self.reach, self.sources = reach, reach.sources
        self._found: dict[str, list[Reference]] = {}
        self.modules = self._ordered()
        self.names = self._names()
        self.imports: set[External] = set()

    def source(self) -> str:
        """Imports and definitions; the header is the caller's."""
        sections = [self._section(module) for module in self.modules]
        return self._import_lines() + "\n\n" + "\n\n".join(sections)

    def _definitions(self, module: str) -> list[str]:
        """The needed names of a module in the order it defines them."""
        return [n for n in self.sources.statements(module) if Definition(module, n) in self.reach.definitions]

    def _ordered(self) -> list[str]:
        """Modules after those they take from."""
        order: list[str] = []

        def visit(module: str) -> None:
            if module in visited or module in self.reach.elsewhere:
                return
            visited.add(module)
            used = {r.meaning for r in self._references(module) if isinstance(r.meaning, Definition)}
            for other in sorted({d.module for d in used} - {module}):
                visit(other)
            order.append(module)

        visited: set[str] = set()
        for module in sorted({d.module for d in self.reach.definitions}):
            visit(module)
        return [m for m in order if self._definitions(m)]

    def _references(self, module: str) -> list[Reference]:
        if module not in self._found:
            parts = [self.sources.statements(module)[name] for name in self._definitions(module)]
            self._found[module] = [r for part in parts for r in references(module, part, self.sources)]
        return self._found[module]

    def _names(self) -> dict[Definition, str]:
        """A name for each definition: its own, unless another or a local variable has it already."""
        hidden = {
            r.meaning
            for module in self.modules
            for r in self._references(module)
            if isinstance(r.meaning, Definition) and isinstance(r.node, ast.Attribute) and r.meaning.name in r.local
        }
        taken = {
            r.meaning.name or r.meaning.module
            for module in self.modules
            for r in self._references(module)
            if isinstance(r.meaning, External)
        }
        names: dict[Definition, str] = {}
        for module in sorted(self.modules, key=lambda m: m == CHOICES):
            for name in self._definitions(module):
                definition = Definition(module, name)
                chosen = f"{name}_op" if definition in hidden else name
                names[definition] = chosen if chosen not in taken else _longer(module, name)
                assert names[definition] not in taken
                taken.add(names[definition])
        return names

    def _section(self, module: str) -> str:
        text = self.sources.text(module)
        parts = [self._definition(text, module, name) for name in self._definitions(module)]
        if module == CHOICES:
            parts.append(self._kinds())
        return f"# {path_in_package(module)}\n" + "\n\n".join(part.rstrip("\n") + "\n" for part in parts)

    def _definition(self, text: Text, module: str, name: str) -> str:
        body = text.tree.body
        at = body.index(self.sources.statements(module)[name])
        documented = (
            at + 1 < len(body) and isinstance(body[at], ast.Assign | ast.AnnAssign) and _is_string(body[at + 1])
        )
        statements = body[at : at + 1 + documented]
        start, end = text.lines_of(statements)
        edits = self._edits(text, module, statements[0], self.names[Definition(module, name)])
        return _spaced(text.part(start, end, edits))

    def _edits(self, text: Text, module: str, statement: ast.stmt, name: str) -> Iterator[Edit]:
        yield from self._renamed(text, statement, name)
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and is_ours(node):
                yield Edit(*text.lines_of([node]), "")
        unknown = set()
        for reference in references(module, statement, self.sources):
            new = self._spelled(reference)
            if new is None:
                unknown.add(reference.node)
            elif new != text.source(reference.node):
                yield text.replace(reference.node, new)
        yield from _without(text, statement, unknown)

    def _renamed(self, text: Text, statement: ast.stmt, name: str) -> Iterator[Edit]:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            if statement.name != name:
                source = text.source(statement)
                written = re.search(rf"\b(?:def|class) ({statement.name})\b", source)
                assert written is not None
                start = text.span(statement)[0] + len(source[: written.start(1)].encode())
                yield Edit(start, start + len(statement.name.encode()), name)
            return
        assert isinstance(statement, ast.Assign | ast.AnnAssign)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name) and target.id != name:
            yield text.replace(target, name)

    def _spelled(self, reference: Reference) -> str | None:
        """How a reference reads in the one file; None for a type that is not in it."""
        meaning = reference.meaning
        if isinstance(meaning, External):
            assert not meaning.module.startswith("triton"), f"{ast.unparse(reference.node)} is a kernel's"
            self.imports.add(meaning)
            return ast.unparse(reference.node)
        if isinstance(meaning, Definition) and meaning in self.names:
            return self.names[meaning]
        if isinstance(meaning, Definition) and meaning.module in self.reach.elsewhere:
            self.imports.add(External(f".{CONFIGURATION_FILE}", meaning.name))
            return meaning.name
        assert reference.annotation, f"{ast.unparse(reference.node)} has no plain source to export"
        if isinstance(meaning, Definition) and meaning.module in (CHOICES, "residua.config.model"):
            return self.names[TABLE]
        return None

    def _kinds(self) -> str:
        """The words by which the tables with methods are found."""
        tables = {type(t) for t in self.reach.facts.tables if Definition(CHOICES, type(t).__name__) in self.names}
        found = {kind_of(t): self.names[Definition(CHOICES, t.__name__)] for t in tables}
        return "TABLES.update({" + ", ".join(f'"{k}": {n}' for k, n in sorted(found.items())) + "})\n"

    def _import_lines(self) -> str:
        """Imports in the usual three groups: the standard library, other packages, this folder."""
        lines: dict[int, list[str]] = defaultdict(list)
        named: dict[str, set[str]] = defaultdict(set)
        for module, name in self.imports:
            if name is None:
                lines[_group(module)].append(f"import {module}")
            else:
                named[module].add(name)
        for module in sorted(named):
            lines[_group(module)].append(f"from {module} import {', '.join(sorted(named[module]))}")
        groups = [sorted(lines[g], key=lambda line: line.startswith("from")) for g in sorted(lines)]
        return "\n\n".join("\n".join(group) for group in groups) + "\n"


def _group(module: str) -> int:
    if module.startswith("."):
        return 2
    return 0 if module.split(".")[0] in sys.stdlib_module_names else 1


def _longer(module: str, name: str) -> str:
    """A name with where it comes from: a table, or the folder of an operator."""
    if module == CHOICES:
        return f"{name}Table"
    parts = module.split(".")
    home = parts[-2] if parts[-1] in ("reference", "chain") else parts[-1]
    return f"_{home}{name}" if name.startswith("_") else f"{home}_{name}"


def _without(text: Text, statement: ast.stmt, unknown: set[ast.Name | ast.Attribute]) -> Iterator[Edit]:
    """Types without the classes that are not in the file: left out of unions, `object` where they stand alone."""
    for node in ast.walk(statement):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            for gone, left in ((node.left, node.right), (node.right, node.left)):
                nothing_left = isinstance(left, ast.Constant)
                if _mentions(gone, unknown) and not _mentions(left, unknown) and not nothing_left:
                    yield text.replace(node, text.source(left))
                    unknown -= {n for n in ast.walk(gone) if isinstance(n, ast.Name | ast.Attribute)}
    for node in unknown:
        yield text.replace(node, "object")


def _mentions(node: ast.AST, unknown: set[ast.Name | ast.Attribute]) -> bool:
    return any(inner in unknown for inner in ast.walk(node))


def _is_string(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _spaced(text: str) -> str:
    """At most one empty line in a row, and none before the end: what was removed leaves no gaps."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1].strip()):
            lines.append(_FOR_LINTERS.sub("", line).rstrip())
    return "\n".join(lines).rstrip("\n") + "\n"
