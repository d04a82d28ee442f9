"""The list of entries covers the five documents, and docs/reproduce.md shows the current list."""

from fractions import Fraction
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.reproduce import app
from residua.reproduce import run_entry
from residua.reproduce.entry import Nothing, Study, load, names
from residua.reproduce.request import estimated_cost
from tests.docs.commands import load_module

ROOT = Path(__file__).parents[2]
CAPTIONED = [
    ("000", "fig", 6), ("000", "table", 4), ("001", "fig", 35), ("002", "fig", 3), ("002", "table", 1),
    ("003", "fig", 8), ("003", "table", 5), ("004", "fig", 13), ("004", "table", 3),
]  # fmt: skip
"""How many figures and tables each document has. 002 does not number them: they are counted in order."""


def test_every_numbered_table_and_figure_has_an_entry() -> None:
    numbered = {f"{paper}:{kind}{n}" for paper, kind, count in CAPTIONED for n in range(1, count + 1)}
    assert set(names()) == numbered


@pytest.mark.slow
def test_the_list_has_every_title_and_unavailable_entries_last(monkeypatch) -> None:
    monkeypatch.setattr(run_entry, "training_rate", lambda: 1e14)
    shown = CliRunner().invoke(app, [], catch_exceptions=False).output.splitlines()
    lacking = shown.index("Not available")
    for name in names():
        (place,) = [place for place, line in enumerate(shown) if line.startswith(f"{name} ")]
        entry = load(name)
        assert entry.title in shown[place] and (place > lacking) == isinstance(entry, Nothing)
    assert "years" not in "".join(shown)


@pytest.mark.parametrize(("rate", "time"), [(1e14, "4.3 hours"), (1e10, "over a month")])
def test_an_impractically_long_time_is_not_a_number(rate: float, time: str) -> None:
    assert run_entry._cells(load("000:table1"), Fraction(1, 32), rate)[:2] == ("24", time)


def test_unavailable_entries_state_a_reason_and_an_alternative() -> None:
    absent = [entry for entry in map(load, names()) if isinstance(entry, Nothing)]
    assert absent and all(entry.reason and entry.nearest for entry in absent)
    words = {word.strip(",.") for entry in absent for word in entry.nearest.split()}
    named = {word for word in words if ":fig" in word or ":table" in word}
    assert named <= set(names())


@pytest.mark.slow
def test_a_cost_counts_rows_sizes_seeds_and_tokens() -> None:
    entry = load("004:table1")
    assert isinstance(entry, Study)
    cost = estimated_cost(entry, Fraction(1))
    assert (cost.runs, cost.tokens) == (9 * 3 * 3, 9 * 3 * 3 * 20_000 * 512 * 1024)
    quarter = estimated_cost(entry, Fraction(1, 4))
    assert quarter.tokens == pytest.approx(cost.tokens / 4, rel=0.01)
    assert quarter.flops < cost.flops / 8


@pytest.mark.slow
def test_the_documented_list_is_current() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert load_module("tools/entries.py").markdown_list() in page, "run `make entries`"
