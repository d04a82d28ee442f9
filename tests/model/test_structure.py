"""Limits that keep the model small: few members of a topology, a short forward pass, no path chosen by name."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.topology import Topology

PACKAGE = Path(__file__).parents[2] / "residua"
MOST_MEMBERS, MOST_LINES = 10, 12
PROBED = {
    "shared_memory_per_block_optin": "some devices have it",
    "grouped_mm": "newer versions of torch",
    "all_gather_single": "newer versions of torch",
    "reduce_scatter_single": "newer versions of torch",
    "hidden_matrices": "any module may declare some, also a plugin's",
    "rounded": "any module may declare some, also a plugin's",
    "eps": "a plugin's table need not have one",
    "fixed": "a plugin's norm need not say so",
    "bias": "experts have none",
    "__name__": "any torch function",
    "__wrapped__": "a decorated method of torch",
    "tags": "an operator of torch",
    "buffer": "a stage of torch's pipeline",
    "__file__": "a module made in memory",
    "_prefetcher": "an object whose constructor failed",
}
"""Names that may be missing without a mistake, and so are read with a default."""
VARIABLES = {"reproduce": "a record's field", "quantize": "refused if missing", "distributed": "torch's trace"}
"""Folders that read by a variable `name`, and what they read."""
OTHERS = {"diagnose", "evaluate", "export", "integrations"}
"""Folders that read objects of other libraries, whose attributes may all be missing."""


def probes(source: str) -> Iterator[str]:
    """The names that a file reads by `getattr` with a default."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name("getattr"), args=[_, name, _]):
                yield name.value if isinstance(name, ast.Constant) else ast.unparse(name)


def test_topology_base_has_two_verbs_and_few_other_members() -> None:
    members = [name for name in vars(Topology) if not name.startswith("_")]
    assert {"open", "step"} <= set(members) and len(members) <= MOST_MEMBERS, members


def test_the_forward_pass_has_at_most_twelve_lines() -> None:
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(Decoder._pass))).body
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1]  # after the docstring
    assert function.end_lineno is not None and function.end_lineno - first.lineno + 1 <= MOST_LINES


@pytest.mark.parametrize("folder", sorted({path.parent.name for path in PACKAGE.glob("*/__init__.py")} - OTHERS))
def test_no_path_is_chosen_by_getattr_with_a_default(folder: str) -> None:
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        assert {*probes(file.read_text(encoding="utf-8"))} <= {*PROBED, *(["name"] * (folder in VARIABLES))}, name


def test_a_getattr_probe_is_detected() -> None:
    assert list(probes('fast = getattr(body, "direct_to_cache", False)\ngetattr(body, "heads")')) == ["direct_to_cache"]


def test_a_topology_with_an_old_fact_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"Old states source_name, which has no effect: .* `source_names`"):
        type("Old", (Topology,), {"source_name": lambda *_: "stream"})
