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
    "hidden_matrices",  # any module may declare some, also a plugin's
    "eps",  # a plugin's table need not have one
    "__name__",  # of any torch function
    "shared_memory_per_block_optin",  # of some devices
    "grouped_mm",  # of newer versions of torch
}
"""Names that may be missing without a mistake, and so are read with a default."""


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


@pytest.mark.parametrize("folder", ["model", "ops", "generate"])
def test_no_path_is_chosen_by_getattr_with_a_default(folder: str) -> None:
    for file in sorted((PACKAGE / folder).rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        assert set(probes(file.read_text(encoding="utf-8"))) <= PROBED, name


def test_a_getattr_probe_is_detected() -> None:
    assert list(probes('fast = getattr(body, "direct_to_cache", False)\ngetattr(body, "heads")')) == ["direct_to_cache"]


def test_a_topology_with_an_old_fact_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"Old states source_name, which has no effect: .* `source_names`"):
        type("Old", (Topology,), {"source_name": lambda *_: "stream"})
