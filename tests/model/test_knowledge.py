"""What a topology, a norm, a mixer or a feed-forward is, only its own folder asks: tools ask it for facts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from residua.config import choices, topologies
from residua.model.attention import SoftmaxAttention
from residua.model.ffn import GatedFFN, PlainFFN, SquaredReluFFN
from residua.model.linear_attention import GatedDeltaNet
from residua.model.moe import MoE
from residua.model.norm import NORMS, Norm
from residua.model.topology import TOPOLOGIES

PACKAGE = Path(__file__).parents[2] / "residua"
HOME = {"model", "config"}
"""Folders whose files may tell their own kinds apart."""

BUILT: tuple[type, ...] = (
    *TOPOLOGIES.values(), *NORMS.values(), SoftmaxAttention, GatedDeltaNet, GatedFFN, PlainFFN, SquaredReluFFN, MoE
)  # fmt: skip
MODULES = {kind.__name__ for kind in BUILT} | {"Streams", "FeedForward"} - {Norm.__name__}
HOMES = (choices.__name__, topologies.__name__)
CHOICES = {name for name, kind in vars(choices).items() if getattr(kind, "__module__", None) in HOMES}
KNOWN = MODULES | CHOICES
TOPOLOGY_FILES = {
    f"residua.model.topology.{file.stem}" for file in (PACKAGE / "model" / "topology").glob("*.py")
} - {"residua.model.topology.__init__", "residua.model.topology.base", "residua.model.topology.facts"}  # fmt: skip


def faults(source: str) -> Iterator[str]:
    """Lines of a file outside the home folders that know what they should ask for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]) if names(kinds) & KNOWN:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Compare(left=ast.Call(func=ast.Name("type"))) if names(node) & KNOWN:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Dict(keys=keys) if any(key is not None and names(key, calls=False) & KNOWN for key in keys):
                yield f"{node.lineno}: a table by type"
            case ast.ImportFrom(module=module) if module in TOPOLOGY_FILES:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(attr="register"), args=[kinds]) if names(kinds) & KNOWN:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.MatchClass(cls=kind) if names(kind) & KNOWN:
                yield f"{node.lineno}: case {ast.unparse(kind)}"


def names(node: ast.expr, calls: bool = True) -> set[str]:
    """The class names in an expression; with `calls` false, not those that it calls."""
    if not calls and isinstance(node, ast.Call):
        return set()
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def files() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in HOME]


@pytest.mark.parametrize("file", files(), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_tools_ask_for_facts_and_not_for_types(file: Path) -> None:
    assert not list(faults(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(topology, BlockAttnRes)",
        "isinstance(topology, attnres.BlockAttnRes | MultiGate)",
        "isinstance(config.ffn, choices.MoE)",
        "type(norm) is RMSNorm",
        "ROWS = {Additive: 3}",
        "DEPTH = {choices.Highway: lambda t: 2}",
        "from residua.model.topology.attnres import BlockAttnRes",
        "divide.register(GatedNorm)",
        "match topology:\n    case MultiGate():\n        pass",
    ],
)
def test_a_line_that_asks_for_a_type_is_found(line: str) -> None:
    assert list(faults(line))


def test_building_a_choice_is_no_fault() -> None:
    assert not list(faults('configs = {"additive": choices.Additive()}\nbuild_topology(choices.Additive(), 4, 16)'))
