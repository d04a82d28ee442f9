"""Rewrite the imports of a module to files next to it. The rest of its text is unchanged."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol

from residua.export.modules import imported_from, member, parsed

ITSELF = "this_module"
"""The name by which a file refers to its own module: transformers does not find `from . import file`."""
MAX_LINE_CHARACTERS = 120


class Place(NamedTuple):
    """The source of an import in the folder: a file, without `.py`, and a name in it."""

    file: str
    name: str


class Folder(Protocol):
    """Describes the contents of the folder that a module is copied to."""

    def travels(self, module: str) -> bool:
        """Return whether imports of a module are rewritten."""

    def place(self, importer: str, module: str, name: str | None) -> Place | None:
        """Find `name` of a module (the module itself if None) for `importer`; None if the import is unchanged."""


class Edit(NamedTuple):
    """Replaces bytes `start` to `end` of the text with `new`."""

    start: int
    end: int
    new: str


def rewritten(text: str, module: str, folder: Folder) -> str:
    """Return the text of a module with its imports rewritten."""
    lines = text.encode().splitlines()
    if not all(_stands_alone(lines, node) for node in parsed(text).imports):
        text = ast.unparse(ast.parse(text)) + "\n"  # `import a; import b`: put each statement on its own line
    edits = _Rewriting(text, module, folder).edits()
    result, at = b"", 0
    content = text.encode()
    for start, end, new in sorted(set(edits)):
        result += content[at:start] + new.encode()
        at = end
    return (result + content[at:]).decode()


def import_lines(places: Mapping[str, Place]) -> list[str]:
    """Write statements that import each name from its place."""
    names: dict[str, list[str]] = defaultdict(list)
    for bound, place in sorted(places.items()):
        names[place.file].append(bound if bound == place.name else f"{place.name} as {bound}")
    lines = []
    for file in sorted(names):
        line = f"from .{file} import {', '.join(names[file])}"
        inside = "".join(f"    {name},\n" for name in names[file])
        lines.append(line if len(line) <= MAX_LINE_CHARACTERS else f"from .{file} import (\n{inside})")
    return lines


def with_itself(text: str) -> str:
    """Return the text of a file that others import as a module."""
    body = ast.parse(text).body
    first = [node.end_lineno or 0 for node in body if _is_header(node, first=node is body[0])]
    lines = text.splitlines(keepends=True)
    at = max(first, default=0)
    return "".join([*lines[:at], f"\nimport sys\n\n{ITSELF} = sys.modules[__name__]\n", *lines[at:]])


def _is_header(node: ast.stmt, *, first: bool) -> bool:
    """Return whether this is a docstring or `from __future__ import …`, which must come first."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    return first and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _stands_alone(lines: list[bytes], node: ast.stmt) -> bool:
    """Return whether no other statement shares this one's lines."""
    assert node.end_lineno is not None
    before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    return not before.strip() and (not after.strip() or after.strip().startswith(b"#"))


class _Rewriting:
    """The edits to one module."""

    def __init__(self, text: str, module: str, folder: Folder) -> None:
        self.text, self.module, self.folder = text, module, folder
        self.starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def edits(self) -> Iterator[Edit]:
        for node in parsed(self.text).imports:
            if isinstance(node, ast.ImportFrom):
                lines = self._from_import(node)
            else:
                lines = self._import(node)
                namespaces = [a for a in node.names if _is_namespace(a) and self.folder.travels(a.name)]
                yield from (self._edit(use, name) for alias in namespaces for use, name, _ in self._used(alias))
            if lines is not None:
                yield self._edit(node, ("\n" + " " * node.col_offset).join(lines or ["pass"]))

    def _edit(self, node: ast.stmt | ast.expr, new: str) -> Edit:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return Edit(start, self.starts[node.end_lineno - 1] + node.end_col_offset, new)

    def _from_import(self, node: ast.ImportFrom) -> list[str] | None:
        """Rewrite `from x import a, b as c`; None if it is unchanged."""
        home = imported_from(self.module, node)
        names = {alias.asname or alias.name: alias.name for alias in node.names}
        if "*" in names and self.folder.travels(home):
            used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
            names = {name: name for name in used if hasattr(import_module(home), name)}
        places = {bound: self.folder.place(self.module, home, name) for bound, name in names.items()}
        copied = {bound: place for bound, place in places.items() if place is not None}
        if not copied:
            return None
        rest = [ast.alias(name, bound if bound != name else None) for bound, name in names.items() if not places[bound]]
        return [*([ast.unparse(ast.ImportFrom(home, rest, 0))] if rest else []), *import_lines(copied)]

    def _import(self, node: ast.Import) -> list[str] | None:
        """`import x.y as z` imports the file's own module; a name bound by `import x.y` is rewritten at each use."""
        if not any(self.folder.travels(alias.name) for alias in node.names):
            return None
        lines = []
        for alias in node.names:
            if not self.folder.travels(alias.name):
                lines.append(ast.unparse(ast.Import([alias])))
            elif _is_namespace(alias):
                lines += import_lines({name: place for _, name, place in self._used(alias)})
            else:
                place = self.folder.place(self.module, alias.name, None)
                lines += import_lines({str(alias.asname): place} if place else {})
        return lines

    def _used(self, alias: ast.alias) -> Iterator[tuple[ast.Attribute, str, Place]]:
        """Yield each `residua.ops.rms` after `import residua.ops`, the name that replaces it, and that name's place."""
        bound = alias.asname or alias.name.split(".")[0]
        root = alias.name if alias.asname else bound
        inner = {id(n.value) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and (path := _path(node)) and path[0] == bound:
                target = _followed(root, path[1:])
                if target is None or (target[1] is None and id(node) in inner):
                    continue
                place = self.folder.place(self.module, *target)
                if place is not None:
                    yield node, "_".join([*target[0].split("."), *([target[1]] if target[1] else [])]), place


def _is_namespace(alias: ast.alias) -> bool:
    """Return whether the import binds a package without a file in the folder: `import x.y` or `import residua as r`."""
    return alias.asname is None or alias.name == "residua"


def _path(node: ast.expr) -> list[str]:
    """["a", "b", "c"] for a.b.c; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = _path(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def _followed(module: str, path: list[str]) -> tuple[str, str | None] | None:
    """Resolve a path of attributes to a module and a name in it; None if the path leads further."""
    for i, name in enumerate(path):
        try:
            value = member(module, name)
        except ImportError:
            return None
        if not isinstance(value, ModuleType):
            return (module, name) if i == len(path) - 1 else None
        module = value.__name__
    return module, None
