"""A study's gains from longer runs of its baseline in another study."""

from __future__ import annotations

from pathlib import Path

import pytest

from residua.config.settings import ConfigError
from residua.study.longer import with_longer
from residua.study.saved import SavedStudy

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def studies() -> tuple[SavedStudy, SavedStudy]:
    short, longer = (SavedStudy.read(RESULTS / f"{name}.json") for name in ("mini-39m", "main-mini"))
    return short, longer


def test_a_loss_out_of_reach_of_the_ladder_has_no_gain(studies: tuple[SavedStudy, SavedStudy]) -> None:
    short, longer = studies
    lower = [
        run.model_copy(
            update={
                "validation": run.validation.model_copy(update={"loss": tuple(x - 1.5 for x in run.validation.loss)})
            }
        )
        if run.variant == "mgr"
        else run
        for run in short.runs
    ]
    result, _ = with_longer(short.model_copy(update={"runs": tuple(lower)}), longer)
    (row,) = (row for row in result.variants if row.name == "mgr")
    assert row.equivalent_tokens is None and row.wall_clock_gain is None and row.throughput_ratio is not None
    (row,) = (row for row in result.variants if row.name == "resformer")
    assert row.wall_clock_gain is not None


def test_losses_of_another_text_are_refused(studies: tuple[SavedStudy, SavedStudy]) -> None:
    short, longer = studies
    assert longer.dataset is not None
    other = longer.dataset.model_copy(update={"bytes_per_token": 4.4})
    with pytest.raises(ConfigError, match="budgets of main-mini: the validation text differs"):
        with_longer(short, longer.model_copy(update={"dataset": other}))
