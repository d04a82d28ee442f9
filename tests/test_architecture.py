"""The import contract, beyond the layers that `lint-imports` checks: no circles, and leaves that import nothing."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

import pytest

import residua

pytestmark = pytest.mark.slow  # parses the whole package

ROOT = Path(residua.__file__).parent
HOLDING_STATEMENTS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of a syntax tree's node that lists of statements, or of what holds them, are in."""
LEAVES = ("residua.machine", "residua.files", "residua.reading", "residua.version")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement that can run, also inside functions: all except those that only type checkers read."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in HOLDING_STATEMENTS:
            if field != "body" or not (isinstance(node, ast.If) and is_for_types(node.test)):
                waiting += getattr(node, field, ())


def is_for_types(test: ast.expr) -> bool:
    """`TYPE_CHECKING`, also of a module. To write every condition out takes seconds."""
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


@cache
def imports(tree: ast.Module) -> set[str]:
    """Modules of Residua that a module imports when it is imported, or later inside a function."""
    found: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules()}
        elif isinstance(node, ast.ImportFrom) and node.module in modules():
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules() else node.module for name in below}
    return found


def stores_class(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)


def find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def test_no_module_is_in_an_import_cycle() -> None:
    """Not even inside a function: such a cycle only hides that two modules are one."""
    assert find_circle({name: imports(tree) - {name} for name, tree in modules().items()}) is None


def test_a_planted_import_cycle_is_found() -> None:
    tree = ast.parse("def later():\n    from residua.train.trainer import train\n")
    graph = {name: imports(tree) for name, tree in modules().items()}
    assert find_circle({**graph, "residua.files": imports(tree)}) is not None


def test_no_object_changes_its_class() -> None:
    """A model for inference is built, not converted from another by `__class__ = …`."""
    stored = ((name, node) for name, tree in modules().items() for node in ast.walk(tree) if stores_class(node))
    assert [f"{name}:{node.lineno}" for name, node in stored] == []


def test_planted_change_of_class_is_found() -> None:
    assert any(stores_class(node) for node in ast.walk(ast.parse("def f(x):\n    x.y, x.__class__ = 1, int")))


def test_no_module_imports_the_package_itself() -> None:
    """`import residua` is for users: inside, the module that has a thing is imported, so that layers can be checked."""
    assert [name for name, tree in modules().items() if "residua" in imports(tree) - {name}] == []


@pytest.mark.parametrize("name", LEAVES)
def test_leaf_modules_import_only_the_error_class(name: str) -> None:
    assert imports(modules()[name]) <= {"residua.errors"}


def test_relative_imports_are_not_used() -> None:
    for name, tree in modules().items():
        assert not [n for n in statements(tree) if isinstance(n, ast.ImportFrom) and n.level], name


def test_a_study_has_at_most_twenty_files() -> None:
    """One idea should need at most five files; `residua/study/__init__.py` says which room has what."""
    files = [name for name in modules() if name.startswith("residua.study")]
    assert len(files) <= 20, "put it where a reader would look for it"
    rooms = modules()["residua.study"].body[0]
    assert isinstance(rooms, ast.Expr) and isinstance(rooms.value, ast.Constant)
    assert all(f"`{name.rpartition('.')[2]}`" in str(rooms.value.value) for name in files if name != "residua.study")


def test_run_study_imports_at_most_ten_modules() -> None:
    """It states the order of steps; other modules implement them."""
    assert len(imports(modules()["residua.study.run_study"])) <= 10
