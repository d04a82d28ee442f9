"""The study's tables: on terminals of several widths, and next to the main one on the page."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from residua.study.page import study_page
from residua.study.plan import Trial, choose
from residua.study.results import OutlierMeans, StudyResult, TaskMeans
from residua.study.statistics import Interval
from residua.study.tables import cells, columns, print_study, side_tables
from residua.study.verdicts import answer, explanation
from tests.study.pretend import pretended


def printed(result: StudyResult, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    print_study(console, result)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def first_table(lines: list[str]) -> list[str]:
    return lines[: next(index for index, line in enumerate(lines) if line.startswith("low precision"))]


@pytest.mark.parametrize("ladder", [True, False])
@pytest.mark.parametrize("width", [10, 40, 60, 80, 90, 100, 120])
def test_tables_break_only_at_spaces(width: int, ladder: bool) -> None:
    """Every word on the terminal is one of a title or a cell; below 80 columns it need only fit."""
    result = pretended(3, ladder=ladder).result
    lines = printed(result, width)
    assert max(map(len, lines)) <= width
    if width < 80:
        return
    lines = first_table(lines)
    said = [column.title for column in columns(result)]
    said += [cell.joined().replace("block_", "block_ ") for row in result.variants for cell in cells(row, result)]
    words = {word for text in (*said, "block_attnres") for word in text.split()}
    assert {word for line in lines for word in line.split() if "─" not in word} <= words


def test_the_terminal_ends_with_the_answer_and_its_reason() -> None:
    result = pretended(2, best=1.3).result
    assert printed(result, 250)[-2:] == [answer(result)[1], explanation(result)]


@pytest.mark.parametrize(("ladder", "kept"), [(True, False), (False, True)])
def test_narrow_terminal_drops_step_gains_with_a_ladder(ladder: bool, kept: bool) -> None:
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


def of(value: float) -> Interval:
    return Interval(value=value, count=3, error=0.01, low=value - 0.04, high=value + 0.04)


@pytest.mark.slow
def test_the_page_has_a_section_per_measurement(tmp_path: Path) -> None:
    made = pretended(2)
    tried = [Trial(factor=f, rate=f / 50, loss=loss) for f, loss in ((0.5, None), (1.0, 3.21), (2.0, 3.25))]
    rates = [choose("mini", name, tried, 1000, 250, "") for name in made.study.variants]
    assert side_tables(made.result, "mini") == []
    outliers = OutlierMeans(peak_activation=of(123.0), sink_ratio=of(7.0))
    measured = {"outliers": outliers, "tasks": {"piqa": TaskMeans(accuracy=of(0.625))}, "train_loss": of(3.3333)}
    rows = tuple(row.model_copy(update=measured) for row in made.result.variants)
    result = made.result.model_copy(update={"variants": rows, "tuning": tuple(rates)})
    page = study_page(made.study, result, {"mini": {}}, tmp_path).html()
    for title in ("Tasks", "Outliers", "Learning rates", "training loss"):
        assert f">{title}<" in page
    for shown in ("62.50", "123", "3.3333", "3.2100", "failed", "with seed 1000, which no other run uses"):
        assert shown in page
    assert "learning rate 0.02, 1× its own." in page


def test_sentences_name_their_size_if_there_are_several() -> None:
    rate = choose("S", "mgr", [Trial(factor=f, rate=f, loss=f) for f in (0.5, 1.0)], 1000, 9, "")
    assert rate.sentence(True).startswith("mgr (S): learning rate 0.5, 0.5× its own; the smallest one tried")
