"""What a model needs of the source: definitions, methods and attributes that can be reached from its entry."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from residua.config.settings import Frozen
from residua.export.edits import Edit, Text, bodies
from residua.export.facts import Facts, Names
from residua.export.scopes import references
from residua.export.simplify import simplify
from residua.export.sources import Definition, Sources

CHOICES = "residua.config.choices"
DECODER = Definition("residua.model.decoder", "Decoder")
BY_TORCH = ("forward", "backward")
"""Methods that torch calls, of modules and of functions with a gradient of their own."""


class Reach:
    """All that a root leads to, by name: a method is needed if anything needed speaks of an attribute so called.

    `whole` modules are kept as they are written; the classes of others lose the methods nobody calls and the
    attributes nobody reads. What is `elsewhere` is another file of the export, to be imported.
    """

    def __init__(
        self,
        roots: list[Definition],
        sources: Sources,
        facts: Facts,
        whole: frozenset[str],
        elsewhere: frozenset[str] = frozenset(),
    ) -> None:
        self.sources, self.facts, self.whole, self.elsewhere = sources, facts, whole, elsewhere
        self._simplified: set[str] = set()
        self.roots = roots
        self.definitions: set[Definition] = set()
        self.attributes: set[str] = set()

    def settle(self) -> None:
        """Cut unreached methods and attributes until only what is needed is left."""
        self._follow()
        while self._cut():
            self._follow()

    def statement(self, definition: Definition) -> ast.stmt:
        if definition.module not in self._simplified:
            self._simplified.add(definition.module)
            if definition.module not in self.whole:
                simplify(definition.module, self.sources, self.facts)
        return self.sources.statements(definition.module)[definition.name]

    def _follow(self) -> None:
        self.definitions, self.attributes = set(self.roots), set()
        taken: set[ast.AST] = set()
        before = -1
        while before != len(taken):
            before = len(taken)
            for definition in list(self.definitions):
                for part in self._parts(definition):
                    if part not in taken:
                        taken.add(part)
                        self._take(definition.module, part)
            self.definitions |= set(self._tables_with_methods())

    def _parts(self, definition: Definition) -> Iterator[ast.AST]:
        """What of a definition counts: of a class only the methods that are needed."""
        statement = self.statement(definition)
        if not isinstance(statement, ast.ClassDef):
            yield statement
            return
        yield from (*statement.bases, *statement.decorator_list)
        for member in statement.body:
            if not isinstance(member, ast.FunctionDef) or self._needs(definition, member):
                yield member

    def _needs(self, definition: Definition, method: ast.FunctionDef) -> bool:
        if definition == DECODER and method.name == "forward":
            return False  # transformers' classes have the head: they enter by `hidden`
        called = method.name.startswith("__") or method.name in BY_TORCH or method.name in self.attributes
        return called or definition.module in self.whole

    def _take(self, module: str, node: ast.AST) -> None:
        for reference in references(module, node, self.sources):
            meaning = reference.meaning
            if not isinstance(meaning, Definition) or meaning.module in self.elsewhere:
                continue
            if not reference.annotation or self._is_alias(meaning):
                self.definitions.add(meaning)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
                self.attributes.add(inner.attr)
            elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "getattr":
                self.attributes |= {
                    a.value for a in inner.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                }

    def _is_alias(self, definition: Definition) -> bool:
        return definition.module != CHOICES and isinstance(self.statement(definition), ast.Assign | ast.AnnAssign)

    def _tables_with_methods(self) -> Iterator[Definition]:
        """The configuration's tables that are asked for more than their keys, with the classes they derive from."""
        for table in self.facts.tables:
            family = [c for c in type(table).__mro__ if issubclass(c, Frozen) and c.__module__ == CHOICES]
            if any(name in self.attributes for c in family for name in methods(c)):
                yield from (Definition(CHOICES, c.__name__) for c in family)

    def _cut(self) -> bool:
        changed = False
        lookups = Lookups(self)
        for module in {d.module for d in self.definitions} - self.whole:
            text = self.sources.text(module)
            edits = [e for d in self.definitions if d.module == module for e in self._surplus(text, d)]
            edits += [e for d in self.definitions if d.module == module for e in lookups.surplus(text, d)]
            if edits:
                self.sources.texts[module] = Text(text.applied(edits))
                changed = True
        return changed

    def _surplus(self, text: Text, definition: Definition) -> Iterator[Edit]:
        statement = self.statement(definition)
        if not isinstance(statement, ast.ClassDef):
            return
        functions = [m for m in statement.body if isinstance(m, ast.FunctionDef)]
        yield from text.drop([m for m in functions if not self._needs(definition, m)], statement.body)
        for method in functions:
            for body in bodies(method) if self._needs(definition, method) else ():
                yield from self._unread(text, body)

    def _unread(self, text: Text, body: list[ast.stmt]) -> Iterator[Edit]:
        """`self.name = …` where no one reads the name."""
        doomed = []
        for statement in body:
            target = _target(statement)
            if isinstance(target, ast.Attribute) and target.attr not in self.attributes:
                doomed.append(statement)
            elif isinstance(statement, ast.Assign) and isinstance(target, ast.Tuple):
                yield from self._unread_part(text, statement, target)
        yield from text.drop(doomed, body)

    def _unread_part(self, text: Text, statement: ast.Assign, target: ast.Tuple) -> Iterator[Edit]:
        """`self.a, self.b = x, y` without the part that no one reads."""
        if not isinstance(statement.value, ast.Tuple) or len(statement.value.elts) != len(target.elts):
            return
        pairs = list(zip(target.elts, statement.value.elts, strict=True))
        kept = [(t, v) for t, v in pairs if not isinstance(t, ast.Attribute) or t.attr in self.attributes]
        if kept and len(kept) < len(pairs):
            left, right = (", ".join(text.source(part) for part in side) for side in zip(*kept, strict=True))
            yield text.replace(statement, f"{left} = {right}")


class Lookups:
    """Which entries of a module's tables, such as FFNS, are ever looked up, where that can be told."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self.asked: dict[Definition, set[object]] = {}
        self.open: set[Definition] = set()
        for definition in reach.definitions:
            for part in reach._parts(definition):
                self._visit(definition.module, part, {})

    def _visit(self, module: str, node: ast.AST, names: Names) -> None:
        if isinstance(node, ast.FunctionDef):
            names = names | self.reach.facts.names(module, node)
        meaning = self.reach.sources.reference(module, node)
        if isinstance(node, ast.Subscript):
            table = self.reach.sources.reference(module, node.value)
            keys = self.reach.facts.values(node.slice, names)
            if isinstance(table, Definition) and keys:
                self.asked.setdefault(table, set()).update(keys)
                return
        if isinstance(meaning, Definition) and isinstance(getattr(node, "ctx", None), ast.Load):
            self.open.add(meaning)
        for child in ast.iter_child_nodes(node):
            self._visit(module, child, names)

    def surplus(self, text: Text, definition: Definition) -> Iterator[Edit]:
        """The table without the entries that no one asks for."""
        table = getattr(self.reach.statement(definition), "value", None)
        asked = self.asked.get(definition)
        if not isinstance(table, ast.Dict) or definition in self.open or asked is None:
            return
        entries = list(zip(table.keys, table.values, strict=True))
        kept = [(k, v) for k, v in entries if not isinstance(k, ast.Constant) or k.value in asked]
        if len(kept) < len(entries):
            yield text.replace(
                table, "{" + ", ".join(f"{text.source(k)}: {text.source(v)}" for k, v in kept if k) + "}"
            )


def _target(statement: ast.stmt) -> ast.expr | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return statement.targets[0]
    return statement.target if isinstance(statement, ast.AnnAssign) else None


def methods(table: type) -> list[str]:
    """The methods and properties that a table's class itself defines, validators aside."""
    return [
        n
        for n, value in vars(table).items()
        if not n.startswith("_") and (callable(value) or isinstance(value, property))
    ]
