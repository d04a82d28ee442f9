"""The study's tables on terminals of several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from residua.study.entries import cells, columns
from residua.study.results import StudyResult
from residua.study.tables import print_study
from tests.study.pretend import pretended


def printed(result: StudyResult, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    print_study(console, result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def first_table(lines: list[str]) -> list[str]:
    return lines[: next(index for index, line in enumerate(lines) if line.startswith("low precision"))]


@pytest.mark.parametrize("ladder", [True, False])
@pytest.mark.parametrize("width", [80, 90, 100, 120])
def test_tables_break_at_spaces_alone(width: int, ladder: bool) -> None:
    """Every word on the terminal is one of a title or a cell."""
    result = pretended(3, ladder=ladder).result
    lines = first_table(printed(result, width))
    assert max(map(len, lines)) <= width
    said = [column.title for column in columns(result)]
    said += [cell.joined().replace("block_", "block_ ") for row in result.variants for cell in cells(row, result)]
    words = {word for text in (*said, "block_attnres") for word in text.split()}
    assert {word for line in lines for word in line.split() if "─" not in word} <= words


@pytest.mark.parametrize(("ladder", "kept"), [(True, False), (False, True)])
def test_a_narrow_terminal_drops_the_step_wise_gain_only_where_a_ladder_replaces_it(ladder: bool, kept: bool) -> None:
    lines = first_table(printed(pretended(3, ladder=ladder).result, 80))
    assert any("step-wise" in line for line in lines) == kept
    assert any("equivalent" in line for line in lines) == ladder
    wide = first_table(printed(pretended(3, ladder=ladder).result, 200))
    assert any("step-wise" in line for line in wide) and any("parameters" in line for line in wide)


def test_long_names_break_after_a_plus_or_an_underscore() -> None:
    lines = first_table(printed(pretended(13).result, 80))
    first = [line.split()[0] for line in lines if line.strip()]
    start = first.index("mgr+")
    assert first[start : start + 4] == ["mgr+", "exoformer_", "dynamic+", "gatednorm"]


@pytest.mark.parametrize("width", [60, 40, 10])
def test_tables_are_printed_on_terminals_too_narrow_for_their_words(width: int) -> None:
    lines = printed(pretended(3).result, width)
    assert max(map(len, lines)) <= width
