"""Small changes to source text, placed by syntax tree: what is not changed keeps its layout and its comments."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

Node = ast.expr | ast.stmt | ast.arg | ast.keyword


class Edit(NamedTuple):
    """Bytes `start` to `end` of a text become `text`."""

    start: int
    end: int
    text: str


class Text:
    """Source text and its tree; positions are bytes, as the tree counts them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._bytes = text.encode()
        self._lines = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    @cached_property
    def definitions(self) -> dict[str, ast.stmt]:
        """Functions, classes and constants at the top, by name."""
        return {name: statement for statement in self.tree.body for name in _defined(statement)}

    def span(self, node: Node) -> tuple[int, int]:
        """Where a node begins and ends, decorators included."""
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: (n.lineno, n.col_offset))
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._lines[first.lineno - 1] + first.col_offset - (first is not node)  # the @ before a decorator
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: Node) -> str:
        return self.cut(*self.span(node))

    def cut(self, start: int, end: int) -> str:
        return self._bytes[start:end].decode()

    def lines_of(self, body: Sequence[ast.stmt]) -> tuple[int, int]:
        """Whole lines of consecutive statements, with the comments right above the first and a docstring below."""
        first = min([body[0], *getattr(body[0], "decorator_list", [])], key=lambda n: n.lineno).lineno - 1
        while first > 0 and self._line(first - 1).lstrip().startswith("#"):
            first -= 1
        assert body[-1].end_lineno is not None
        return self._lines[first], self._lines[body[-1].end_lineno]

    def _line(self, number: int) -> str:
        return self.cut(self._lines[number], self._lines[number + 1])

    def replace(self, node: Node, text: str) -> Edit:
        return Edit(*self.span(node), text)

    def drop(self, doomed: Sequence[ast.stmt], body: Sequence[ast.stmt]) -> Iterable[Edit]:
        """Remove statements of a body, leaving `pass` if they are all there is."""
        for statement in doomed:
            start, end = self.lines_of([statement])
            last = len(doomed) == len(body) and statement is body[-1]
            yield Edit(start, end, f"{' ' * statement.col_offset}pass\n" if last else "")

    def applied(self, edits: Iterable[Edit]) -> str:
        """The text with edits made; where two overlap, the first and outermost counts."""
        return self.part(0, len(self._bytes), edits)

    def part(self, start: int, end: int, edits: Iterable[Edit]) -> str:
        """Bytes `start` to `end` with the edits that lie in them."""
        out, position = [], start
        for edit in sorted(edits, key=lambda e: (e.start, -e.end)):
            if edit.start >= position:
                out += [self.cut(position, edit.start), edit.text]
                position = edit.end
        return "".join(out) + self.cut(position, end)


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [t.id for t in targets if isinstance(t, ast.Name)]


def shifted(text: str, by: int) -> str:
    """Lines moved to the left by some columns; what stands further left, as in a long string, stays."""
    return "".join(line[by:] if line[:by].isspace() else line for line in text.splitlines(keepends=True))


def bodies(tree: ast.AST) -> Iterable[list[ast.stmt]]:
    """Every list of statements in a tree."""
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and statements:
                yield statements
