"""Only its own folder checks the type of a topology, norm, mixer or feed-forward: tools query its facts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from residua.config import choices, mixers, topologies
from residua.model.attention import SoftmaxAttention
from residua.model.ffn import GatedFFN, PlainFFN, SquaredReluFFN
from residua.model.latent_attention import LatentAttention
from residua.model.linear_attention import GatedDeltaNet, KimiDeltaAttention
from residua.model.moe import MoE
from residua.model.norm import NORMS
from residua.model.topology import TOPOLOGIES

PACKAGE = Path(__file__).parents[2] / "residua"
HOME = {"model", "config"}
"""Folders whose files may distinguish their own kinds."""
NOT_AT_HOME = {"config/run.py", "config/variants.py", "model/size.py"}
"""Files of those folders that serve all kinds equally."""

BUILT: tuple[type, ...] = (
    *TOPOLOGIES.values(), *NORMS.values(), SoftmaxAttention, LatentAttention, GatedDeltaNet, KimiDeltaAttention,
    GatedFFN, PlainFFN, SquaredReluFFN, MoE,
)  # fmt: skip
MODULES = {kind.__name__ for kind in BUILT} | {"Streams", "FeedForward"}
FAMILIES = (
    choices.TopologyChoice, choices.NormChoice, choices.Mixer, choices.HybridAttention, choices.DenseChoice, choices.MoE
)  # fmt: skip
HOMES = (choices.__name__, mixers.__name__, topologies.__name__)
CHOICES = {name for name, kind in vars(choices).items() if getattr(kind, "__module__", None) in HOMES}
KNOWN = MODULES | CHOICES
KINDS = {
    kind.model_fields["kind"].default
    for kind in vars(choices).values()
    if isinstance(kind, type) and issubclass(kind, FAMILIES) and "kind" in kind.model_fields
} - {PydanticUndefined}
"""The values of `kind` of topologies, norms, mixers and feed-forwards."""
TOPOLOGY_FILES = {
    f"residua.model.topology.{file.stem}" for file in (PACKAGE / "model" / "topology").glob("*.py")
} - {"residua.model.topology.__init__", "residua.model.topology.base", "residua.model.topology.facts"}  # fmt: skip
STEMS = {name.rpartition(".")[2] for name in TOPOLOGY_FILES}
DESCRIBES_ANOTHER_MODEL = {f"convert/{file.name}" for file in (PACKAGE / "convert").glob("*.py")}
"""Files that say which configuration is another library's model: they compare kinds, and know nothing else of them."""


def faults(source: str) -> Iterator[str]:
    """Lines of a file that check which kind something is, instead of querying a fact."""
    nodes = list(ast.walk(ast.parse(source)))
    known = KNOWN | {
        alias.asname
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.name in KNOWN
    }
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]) if names(kinds) & known:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Compare() if asks_type(node) and (names(node) | words(node)) & known:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Compare() if "kind" in names(node) and words(node) & KINDS:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Subscript(value=ast.Dict() as table, slice=key) if "kind" in names(key) and words(table) & KINDS:
                yield f"{node.lineno}: a table by kind"
            case ast.Match(subject=subject, cases=cases) if "kind" in names(subject) and words(*cases) & KINDS:
                yield f"{node.lineno}: match {ast.unparse(subject)}"
            case ast.Dict(keys=keys) if any(key is not None and names(key, calls=False) & known for key in keys):
                yield f"{node.lineno}: a table by type"
            case ast.Assign(value=ast.Tuple(elts=kinds) | ast.List(elts=kinds) | ast.Set(elts=kinds)) if (
                set().union(*(names(kind, calls=False) for kind in kinds)) & known
            ):
                yield f"{node.lineno}: a list of types"
            case ast.ImportFrom(module="residua.model.topology", names=files) if {f.name for f in files} & STEMS:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.ImportFrom(module=module) if module in TOPOLOGY_FILES:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Import(names=files) if {f.name for f in files} & TOPOLOGY_FILES:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.Call(func=ast.Attribute(attr="register"), args=[kinds]) if names(kinds) & known:
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.MatchClass(cls=kind) if names(kind) & known:
                yield f"{node.lineno}: case {ast.unparse(kind)}"


def asks_type(node: ast.Compare) -> bool:
    """Whether a comparison looks at `type(x)` or `x.__class__`."""
    called = {n.func.id for n in ast.walk(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return "type" in called or "__class__" in names(node)


def names(node: ast.AST, calls: bool = True) -> set[str]:
    """The names and attributes in an expression, none of torch's `nn`; with `calls` false, none of a call."""
    if not calls and isinstance(node, ast.Call):
        return set()
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    attributes = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return found | {n.attr for n in attributes if ast.unparse(n.value) != "nn"}


def words(*nodes: ast.AST) -> set[str]:
    """The strings in some syntax trees."""
    constants = (n.value for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def files() -> list[Path]:
    found = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
    outside = {name for name in found if name.split("/")[0] not in HOME} | NOT_AT_HOME
    return [found[name] for name in sorted(outside - DESCRIBES_ANOTHER_MODEL)]


@pytest.mark.slow
def test_tools_query_facts_not_types() -> None:
    found = {file.relative_to(PACKAGE).as_posix(): list(faults(file.read_text(encoding="utf-8"))) for file in files()}
    assert len(found) > 300 and not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(topology, BlockAttnRes)",
        "isinstance(topology, attnres.BlockAttnRes | MultiGate)",
        "isinstance(config.ffn, choices.MoE)",
        "type(norm) is RMSNorm",
        "RMSNorm is type(norm)",
        "type(norm) in (RMSNorm, DyT)",
        "norm.__class__ is RMSNorm",
        "type(norm).__name__ == 'RMSNorm'",
        "config.topology.kind == 'additive'",
        "config.attention.kind in ('softmax', 'hybrid')",
        "'moe' != kind",
        "{'additive': 3, 'multi_gate': 9}[config.topology.kind]",
        "match config.topology.kind:\n    case 'additive' | 'clipped':\n        pass",
        "STREAMS = (MultiGate, Highway)",
        "from residua.model.norm import RMSNorm as Plain\nisinstance(norm, Plain)",
        "from residua.model.topology import attnres",
        "import residua.model.topology.multigate as gates",
        "ROWS = {Additive: 3}",
        "DEPTH = {choices.Highway: lambda t: 2}",
        "from residua.model.topology.attnres import BlockAttnRes",
        "divide.register(GatedNorm)",
        "match topology:\n    case MultiGate():\n        pass",
    ],
)
def test_a_type_check_is_detected(line: str) -> None:
    assert list(faults(line))


def test_building_a_choice_is_allowed() -> None:
    assert not list(faults('configs = {"additive": choices.Additive()}\nbuild_topology(choices.Additive(), 4, 16)'))
