"""docs/reference has every option and every key of a configuration, each with its meaning, as the code has them."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Literal

import pytest

from residua.config.run import RunConfig
from residua.config.settings import Frozen, flat
from tests.docs.commands import load_module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load_module("tools/reference.py")


def test_committed_reference_matches_the_code(reference: ModuleType) -> None:
    stale = [path.name for path, text in reference.made().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make reference` and commit what it writes"


def test_every_option_and_key_has_a_description(reference: ModuleType) -> None:
    for text in reference.made().values():
        lacking = [line for line in text.splitlines() if re.search(r"\| *\|$", line) and "| kind" not in line]
        assert lacking == []


def test_every_key_of_a_preset_is_in_the_reference(reference: ModuleType) -> None:
    page = reference.config()
    keys = {key.rpartition(".")[2] for key in flat(RunConfig.find("mini-mgr").model_dump())} - {"kind"}
    assert len(keys) > 60 and [key for key in sorted(keys) if f"| `{key}` |" not in page] == []


def test_key_description_comes_from_its_or_the_class_docstring(reference: ModuleType) -> None:
    table = next(each for each in reference._tables(RunConfig.model_fields["model"].annotation))
    about, meanings = reference._about(table)
    assert about == "A decoder-only language model."
    assert meanings["width"] == "Channels of the residual stream."
    assert meanings["embed_scale"] == "Embedded tokens are multiplied by `embed_scale`."
    assert meanings["context"] == "See `vocab_size`."


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "integer"),
        (Literal["a", "b"], "`a`, `b`"),
        (tuple[float, ...] | None, "list of number"),
        (Frozen, "table"),
    ],
)
def test_types_are_described_in_words(reference: ModuleType, annotation: object, words: str) -> None:
    assert reference._type(annotation, []) == words
