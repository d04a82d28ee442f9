"""Accuracies, outliers and tried learning rates on the study's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from residua.study.measures import Interval, OutlierMeans, TaskMeans
from residua.study.page import study_page
from residua.study.side_tables import rate_sentence, side_tables
from residua.study.trials import Trial, choose
from tests.study.pretend import pretended


def of(value: float) -> Interval:
    return Interval(value=value, count=3, error=0.01, low=value - 0.04, high=value + 0.04)


@pytest.mark.slow
def test_the_page_has_a_section_for_each_that_was_measured(tmp_path: Path) -> None:
    made = pretended(2)
    tried = [Trial(factor=f, rate=f / 50, loss=loss) for f, loss in ((0.5, None), (1.0, 3.21), (2.0, 3.25))]
    rates = [choose("mini", name, tried, 1000, 250, "") for name in made.study.variants]
    rows = tuple(
        row.model_copy(
            update={
                "outliers": OutlierMeans(peak_activation=of(123.0), sink_ratio=of(7.0)),
                "tasks": {"piqa": TaskMeans(accuracy=of(0.625), difference=of(0.03) if row.name == "mgr" else None)},
                "train_loss": of(3.3333),
            }
        )
        for row in made.result.variants
    )
    result = made.result.model_copy(update={"variants": rows, "tuning": tuple(rates)})
    page = study_page(made.study, result, {"mini": {}}, tmp_path).html()
    for title in ("Tasks", "Outliers", "Learning rates", "training loss"):
        assert f">{title}<" in page
    for shown in ("62.50", "123", "3.3333", "3.2100", "failed", "with seed 1000, which no other run has"):
        assert shown in page
    assert "learning rate 0.02, 1× its own." in page


def test_tables_of_what_was_not_measured_are_left_out() -> None:
    assert side_tables(pretended(2).result, "mini") == []


def test_with_several_sizes_a_sentence_names_its_own() -> None:
    rate = choose("S", "mgr", [Trial(factor=f, rate=f, loss=f) for f in (0.5, 1.0)], 1000, 9, "")
    assert rate_sentence(rate, True).startswith("mgr (S): learning rate 0.5, 0.5× its own; the smallest that was tried")
