"""Gains from longer runs of a baseline in another study, and the labels of curves."""

import re
from pathlib import Path

import pytest

from residua.config.settings import ConfigError
from residua.report.scatter import Point
from residua.study.gains import loses, pays
from residua.study.page import show_saved
from residua.study.results_file import SavedStudy
from residua.train.result import FinalValidation
from tests.docs.commands import load_module

extras = load_module("tools/study_extras.py")
with_external_ladder = extras.with_external_ladder
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def studies() -> tuple[SavedStudy, SavedStudy]:
    short, longer = (SavedStudy.read(RESULTS / f"{name}.json") for name in ("mini-39m", "main-mini"))
    return short, longer


@pytest.mark.slow
def test_a_loss_beyond_the_ladder_has_no_gain(studies: tuple[SavedStudy, SavedStudy]) -> None:
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
    result, _ = with_external_ladder(short.model_copy(update={"runs": tuple(lower)}), longer)
    (row,) = (row for row in result.variants if row.name == "mgr")
    assert row.equivalent_tokens is None and row.wall_clock_gain is None and row.throughput_ratio is not None
    (row,) = (row for row in result.variants if row.name == "resformer")
    assert row.wall_clock_gain is not None


@pytest.mark.slow
def test_rows_without_a_speed_use_the_external_ladder(studies: tuple[SavedStudy, SavedStudy]) -> None:
    short, longer = studies
    timed = with_external_ladder(short, longer)[0]
    runs = tuple(run.model_copy(update={"tokens_per_second": None}) for run in short.runs)
    models = tuple(model.model_copy(update={"timings": {}}) for model in short.models)
    untimed = with_external_ladder(short.model_copy(update={"runs": runs, "models": models}), longer)[0]
    (now,), (then,) = ([row for row in r.variants if row.name == "resformer"] for r in (untimed, timed))
    assert now.wall_clock_gain is None and then.wall_clock_gain is not None
    assert now.equivalent_tokens == then.equivalent_tokens


def test_losses_on_another_text_are_refused(studies: tuple[SavedStudy, SavedStudy]) -> None:
    short, longer = studies
    other = longer.dataset.model_copy(update={"bytes_per_token": 4.4})
    with pytest.raises(ConfigError, match="budgets of main-mini: the validation text differs"):
        with_external_ladder(short, longer.model_copy(update={"dataset": other}))


def test_losses_on_another_part_of_the_text_are_refused(studies: tuple[SavedStudy, SavedStudy]) -> None:
    short, longer = studies
    final = FinalValidation(loss=3.0, bits_per_byte=1.0, tokens=4096)
    whole = tuple(run.model_copy(update={"final": final}) for run in longer.runs)
    with pytest.raises(ConfigError, match="losses are on 131072 validation tokens, those of main-mini on 4096"):
        with_external_ladder(short, longer.model_copy(update={"runs": whole}))


@pytest.mark.slow
def test_published_studies_report_gains_left_after_correction(studies: tuple[SavedStudy, SavedStudy]) -> None:
    small, longer = studies
    at_s = show_saved(SavedStudy.read(RESULTS / "main-s.json"))
    assert sum(map(pays, at_s.variants)) == 6 and not any(map(loses, at_s.variants))
    best = next(row for row in at_s.variants if row.name == "mgr2_resformer")
    assert best.shrunk.value < best.wall_clock_gain.value
    first = ["resformer", "mgr_resformer", "mgr_independent", "naive", "nuresformer", "gatednorm_resformer", "strong"]
    assert [row.name for row in show_saved(small).variants if pays(row)] == first
    new_text = with_external_ladder(small, longer)[0].variants
    assert [row.name for row in new_text if pays(row)] == ["resformer", "mgr_resformer", "naive", "gatednorm_resformer"]


def test_column_labels_stay_apart_and_near_their_points() -> None:
    assert extras.spread([10.0, 50.0, 90.0], 13.0, 0.0, 100.0) == [10.0, 50.0, 90.0]
    assert extras.spread([50.0, 50.0, 50.0], 10.0, 0.0, 100.0) == pytest.approx([40.0, 50.0, 60.0])
    assert extras.spread([20.0, 22.0, 30.0, 80.0], 10.0, 0.0, 100.0) == pytest.approx([14.0, 24.0, 34.0, 80.0])
    assert extras.spread([1.0, 2.0], 10.0, 0.0, 100.0) == [0.0, 10.0]
    assert extras.spread([98.0, 99.0], 10.0, 0.0, 100.0) == [90.0, 100.0]


def test_a_column_labels_every_point_with_a_leader_line() -> None:
    points = [Point("a", 1.0, 2.0, "#111111"), Point("b", 1.0, 2.01, "#222222")]
    drawn = extras.CurveEnds(points, (), "x", "y").svg("t")
    a, b = (float(re.search(rf'y="([0-9.]+)" fill="#[0-9]+">{name}<', drawn)[1]) for name in "ab")
    assert a - b == pytest.approx(13.0, abs=0.11) and drawn.count("<circle") == drawn.count('stroke-opacity="0.4"') == 2
