"""A module's source cut down to what one configuration leaves of it: settled choices, no taps, no kernels."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from residua.export.edits import Edit, Text, bodies, shifted
from residua.export.facts import Facts, Names, kind_of
from residua.export.sources import Definition, Module, Sources

PLAIN = ("reference", "chain", "numeric", "__init__")
"""The files of `ops` that hold plain PyTorch; the others hold kernels and what serves them."""

CONFIGURATION = ("residua.config.choices", "residua.config.model")


def simplify(module: str, sources: Sources, facts: Facts) -> None:
    """Rewrite a module's text, definition by definition and step by step, until nothing more can be settled."""
    text, edits = sources.text(module), []
    for statement in text.tree.body:
        span = text.lines_of([statement])
        part = before = Text(text.cut(*span))
        while steps := list(Simplifier(module, part, sources, facts).edits()):
            part = Text(part.applied(steps))
        if part is not before:
            edits.append(Edit(*span, part.text))
    sources.texts[module] = Text(text.applied(edits))


class Simplifier:
    """One round over a piece of a module: the edits that can be made at once."""

    def __init__(self, module: str, text: Text, sources: Sources, facts: Facts) -> None:
        self.module, self.text, self.sources, self.facts = module, text, sources, facts

    def edits(self) -> Iterator[Edit]:
        for body in bodies(self.text.tree):
            yield from self._statements(body)
        yield from self._expressions(self.text.tree, {})

    def _statements(self, body: list[ast.stmt]) -> Iterator[Edit]:
        yield from self.text.drop([s for s in body if self._is_idle(s)], body)
        for i, statement in enumerate(body):
            if isinstance(statement, ast.If) and _settled(statement.test):
                yield from self._settled_if(statement, body)
            elif isinstance(statement, ast.Return | ast.Raise) and i + 1 < len(body):
                yield Edit(*self.text.lines_of(body[i + 1 :]), "")

    def _is_idle(self, statement: ast.stmt) -> bool:
        """A tap, an assertion that holds, a branch or loop with nothing in it, a check of the configuration."""
        if self.module in CONFIGURATION and _is_pydantic(statement):
            return True
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            return self._refers(statement.value.func, Definition("residua.model.taps", "tap"))
        if isinstance(statement, ast.Assert):
            return isinstance(statement.test, ast.Constant) and statement.test.value is True
        if isinstance(statement, ast.If | ast.For):
            return not statement.orelse and all(isinstance(s, ast.Pass) for s in statement.body)
        return False

    def _settled_if(self, statement: ast.If, body: list[ast.stmt]) -> Iterator[Edit]:
        chosen = statement.body if _truth(statement.test) else statement.orelse
        is_elif = self.text.source(statement).startswith("elif")
        if not chosen:
            yield from self.text.drop([statement], [] if is_elif else body)
            return
        start, end = self.text.lines_of([statement])
        inner = self.text.cut(*self.text.lines_of(chosen))
        if inner.lstrip().startswith("elif"):
            new = inner if is_elif else inner.replace("elif", "if", 1)
        elif is_elif:
            new = f"{' ' * statement.col_offset}else:\n{inner}"
        else:
            new = shifted(inner, chosen[0].col_offset - statement.col_offset)
        yield Edit(start, end, new)

    def _expressions(self, node: ast.AST, names: Names) -> Iterator[Edit]:
        if isinstance(node, ast.FunctionDef):
            names = names | self.facts.names(self.module, node)
        if isinstance(node, ast.comprehension) and [_settled(i) and _truth(i) for i in node.ifs] == [True]:
            yield Edit(self.text.span(node.iter)[1], self.text.span(node.ifs[0])[1], "")
        if isinstance(node, ast.expr):
            for rule in self._rules():
                if (new := rule(node, names)) is not None:
                    yield self.text.replace(node, new)
                    return
        for child in ast.iter_child_nodes(node):
            yield from self._expressions(child, names)

    def _rules(self) -> tuple[Callable[[ast.expr, Names], str | None], ...]:
        return self._settled_call, self._comparison, self._choice, self._table_of_kinds, self._logic

    def _settled_call(self, node: ast.expr, names: Names) -> str | None:
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            return self.facts.is_instance(self.module, node, names)
        if ast.unparse(node.func) == "torch.compiler.is_compiling" or self._asks_for_kernel(node):
            return "False"
        return self._made_table(node)

    def _asks_for_kernel(self, node: ast.Call) -> bool:
        """A call of `serves`, `holds` … of a file of kernels."""
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("serves", "holds", "asked"):
            return False
        home = self.sources.reference(self.module, node.func.value)
        return isinstance(home, Module) and home.module.rpartition(".")[2] not in PLAIN

    def _made_table(self, node: ast.Call) -> str | None:
        """`choices.RMSNorm()` as a plain table with the same keys."""
        meaning = self.sources.reference(self.module, node.func)
        kinds = self.facts.classes(self.module, node.func)
        if not kinds or not isinstance(meaning, Definition) or meaning.module != "residua.config.choices":
            return None
        keys = {key: repr(field.get_default()) for key, field in kinds[0].model_fields.items()}
        keys |= {str(k.arg): self.text.source(k.value) for k in node.keywords}
        return f"Table({', '.join(f'{key}={value}' for key, value in keys.items())})"

    def _comparison(self, node: ast.expr, names: Names) -> str | None:
        """`config.gate == "none"`, `config.softmax is None`, where the answer is always the same."""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return None
        tests: dict[type, Callable[[object, object], bool]] = {
            ast.Eq: lambda a, b: a == b,
            ast.NotEq: lambda a, b: a != b,
            ast.Is: lambda a, b: a is b,
            ast.IsNot: lambda a, b: a is not b,
        }
        test = tests.get(type(node.ops[0]))
        left, right = (self.facts.values(n, names) for n in (node.left, node.comparators[0]))
        if test is None or not left or not right:
            return None
        answers = {test(a, b) for a in left for b in right}
        return str(answers.pop()) if len(answers) == 1 else None

    def _choice(self, node: ast.expr, names: Names) -> str | None:
        """`{"rms": QKNorm, "none": NoQKNorm}[config.qk_norm]` with the entries that occur; one alone is itself."""
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Dict):
            return None
        possible = self.facts.values(node.slice, names)
        entries = list(zip(node.value.keys, node.value.values, strict=True))
        if not possible or not all(isinstance(k, ast.Constant) for k, _ in entries):
            return None
        kept = [(k, v) for k, v in entries if isinstance(k, ast.Constant) and k.value in possible]
        if len(kept) == 1:
            value = self.text.source(kept[0][1])
            return (
                value
                if isinstance(kept[0][1], ast.Name | ast.Constant | ast.Dict | ast.Attribute | ast.Call)
                else f"({value})"
            )
        if len(kept) == len(entries):
            return None
        inside = ", ".join(f"{self.text.source(k)}: {self.text.source(v)}" for k, v in kept)
        return f"{{{inside}}}[{self.text.source(node.slice)}]"

    def _table_of_kinds(self, node: ast.expr, names: Names) -> str | None:
        """`{choices.RMSNorm: RMSNorm, …}` by the kinds' words, and `[type(config)]` by `[config.kind]`."""
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Call):
            call = node.slice
            if isinstance(call.func, ast.Name) and call.func.id == "type" and len(call.args) == 1:
                return f"{self.text.source(node.value)}[{self.text.source(call.args[0])}.kind]"
        if not isinstance(node, ast.Dict) or not node.keys:
            return None
        kinds = [self.facts.classes(self.module, key) for key in node.keys]
        if not all(kinds):
            return None
        used = [(k[0], v) for k, v in zip(kinds, node.values, strict=True) if self.facts.used(k)]
        return "{" + ", ".join(f'"{kind_of(k)}": {self.text.source(v)}' for k, v in used) + "}"

    def _logic(self, node: ast.expr, names: Names) -> str | None:
        """and, or, not and if-else of what is settled."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _settled(node.operand):
            return str(not _truth(node.operand))
        if isinstance(node, ast.IfExp) and _settled(node.test):
            return self.text.source(node.body if _truth(node.test) else node.orelse)
        if isinstance(node, ast.BoolOp) and any(_settled(v) for v in node.values):
            decisive = isinstance(node.op, ast.Or)
            if any(_settled(v) and _truth(v) is decisive for v in node.values):
                return str(decisive)
            open_ones = [self.text.source(v) for v in node.values if not _settled(v)]
            return (" or " if decisive else " and ").join(open_ones) or str(not decisive)
        return None

    def _refers(self, node: ast.AST, definition: Definition) -> bool:
        return self.sources.reference(self.module, node) == definition


def _is_pydantic(statement: ast.stmt) -> bool:
    """What only checking needs: fields with their types, validators, and the constructor that explains errors."""
    if isinstance(statement, ast.AnnAssign):
        return statement.col_offset > 0
    if not isinstance(statement, ast.FunctionDef) or statement.col_offset == 0:
        return False
    return statement.name == "__init__" or any("validator" in ast.unparse(d) for d in statement.decorator_list)


def _settled(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _truth(node: ast.expr) -> bool:
    assert isinstance(node, ast.Constant)
    return bool(node.value)
