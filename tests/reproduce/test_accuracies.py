"""Claims about accuracies, training losses and outliers, from runs with known numbers; the tasks of an entry."""

from fractions import Fraction
from pathlib import Path

import pytest

from residua.data import Dataset
from residua.reproduce import request as requested
from residua.reproduce.claims import Measured, Verdict, verdicts
from residua.reproduce.comparison import Comparison
from residua.reproduce.entry import Nothing, Study, load, names
from residua.reproduce.measures import MEASURES
from residua.reproduce.request import Request, build_study, selected, tasks_sentence
from residua.reproduce.run_entry import planned_cost
from residua.study.collect_results import collect
from residua.study.config import StudyConfig
from residua.study.extend_study import complete_records
from residua.study.plan import StudyPlan, make_plan
from residua.study.records import ACCURACIES, OUTLIERS, Accuracies, Outliers, TaskAccuracy
from tests.reproduce.conftest import QUICK
from tests.study.recorded import write_run

CLAIM = "The dynamic variant gains 2.13 points of downstream accuracy over the baseline"
ROWS = ("base", "exoformer_dynamic")
Recorded = tuple[Study, StudyConfig, StudyPlan, Path]


def entry_of(name: str, rows: tuple[str, ...] = (), **changes: object) -> tuple[Study, Request]:
    steps = tuple(c for c in QUICK if not c.startswith("train.steps")) + ("train.steps=10",)
    request = Request(Fraction(1, 10**6), rows=rows, set=steps, **changes)
    entry = load(name)
    assert isinstance(entry, Study)
    return selected(entry, request), request


@pytest.fixture(scope="module")
def runs(dataset: Dataset, tmp_path_factory) -> Recorded:
    """Three seeds of two rows, with outliers and without accuracies."""
    out = tmp_path_factory.mktemp("runs")
    entry, request = entry_of("000:table1", ROWS, data=str(dataset.path), no_tasks=True)
    study = build_study("000:table1", entry, request)
    plan = make_plan(study, out, dataset)
    for run in plan.runs:
        write_run(run, lambda run, step: 3.0)
        peak = Outliers(peak_activation=50.0 if run.variant == "base" else 10.0, sink_ratio=2.0, attention_sink=0.2)
        (run.folder / OUTLIERS).write_text(peak.model_dump_json())
    return entry, study, plan, out


def scored(runs: Recorded, dynamic: float, wanted: tuple[str, ...] = ("arc", "piqa")) -> Measured:
    """The same runs with accuracies on two tasks, the second always one half; the baseline has 0.25 on the first."""
    entry, study, plan, out = runs
    for run in plan.runs:
        right = (0.25 if run.variant == "base" else dynamic) + 0.001 * run.seed
        found = {"arc": TaskAccuracy(value=right), "piqa": TaskAccuracy(value=0.5)}
        (run.folder / ACCURACIES).write_text(Accuracies(wanted=wanted, tasks=found).model_dump_json())
    return Measured(entry, collect(study, plan, complete_records(plan, {}), {}), out)


def verdict(measured: Measured) -> Verdict:
    (found,) = [verdict for verdict in verdicts(measured) if verdict.claim == CLAIM]
    return found


@pytest.mark.slow
def test_accuracy_claims_use_the_mean_over_tasks(runs: Recorded) -> None:
    for dynamic, word in ((0.15, "contradicted"), (0.25, "not shown"), (0.35, "confirmed")):
        measured = scored(runs, dynamic)
        found = verdict(measured)
        assert found.direction == word
        assert f"exoformer_dynamic against base: accuracy {100 * (dynamic - 0.25) / 2:+.4f} [" in found.found
        assert found.printed.startswith("+2.13, ")
    shown = Comparison("000:table1", measured.entry, "", measured.out).markdown(measured.result)
    assert "accuracy, paper" in shown and "| 48.14 | 37.55 ± 0.03 |" in shown
    part = scored(runs, 0.35, wanted=("arc", "piqa", "boolq"))
    told = "exoformer_dynamic against base: accuracy not measured"
    assert (verdict(part).direction, verdict(part).found) == ("not shown", told), "not a mean over some of the tasks"


@pytest.mark.slow
def test_outliers_and_training_losses_are_measured_by_default(runs: Recorded) -> None:
    measured = scored(runs, 0.25)
    for name, value in (("peak_activation", 50.0), ("sink_ratio", 2.0), ("attention_sink", 0.2), ("train_loss", 3.0)):
        measure = MEASURES[name]
        assert not (measure.quantized or measure.diagnosed)
        assert measured.values("450M", "base", measure) == dict.fromkeys(range(3), value)


def test_entries_with_accuracies_name_their_tasks() -> None:
    entries = {name: entry for name in names() if not isinstance(entry := load(name), Nothing)}
    asked = {name: entry.tasks for name, entry in entries.items() if entry.tasks}
    assert asked == {"000:table1": ("exoformer",), "000:table3": ("exoformer",), "003:table2": ("mmlu",)}
    assert [
        name for name, entry in entries.items() if any("does not run tasks" in w for w in entry.unmeasured.values())
    ] == []


def test_tasks_come_from_a_folder_or_the_harness_or_are_skipped(tmp_path: Path, monkeypatch) -> None:
    def asked(**changes: object) -> tuple[object, str]:
        entry, request = entry_of("000:table1", ROWS, **changes)
        study = build_study("000:table1", entry, request)
        found = None if study.tasks is None else study.tasks.model_dump(exclude_none=True)
        return found, tasks_sentence(entry, study)

    monkeypatch.setattr(requested, "find_spec", lambda name: None)
    assert asked()[0] is None and "give --task-dir FOLDER" in asked()[1]
    local = {"names": ("exoformer",), "folder": "tasks", "shots": 5, "limit": 9}
    assert asked(task_dir="tasks", limit=9) == (local, "Every model is scored on exoformer from tasks.")
    monkeypatch.setattr(requested, "find_spec", lambda name: object())
    assert asked()[0] == {"names": ("exoformer",), "shots": 5}
    assert asked(no_tasks=True)[0] is None


@pytest.mark.slow
def test_a_learning_rate_search_is_in_the_plan_and_its_cost(dataset: Dataset, tmp_path: Path) -> None:
    entry, request = entry_of("000:table1", ROWS, data=str(dataset.path), no_tasks=True, tune=("1x", "2x"), seeds=1)
    study = build_study("000:table1", entry, request)
    plan = make_plan(study, tmp_path / "study", dataset)
    assert study.tune is not None and study.tune.lr == (1.0, 2.0)
    assert (len(plan.runs), len(plan.trials)) == (2, 4)
    assert planned_cost(plan).runs == 6


def test_smoothquant_calibrates_on_the_requested_sequences(tmp_path: Path) -> None:
    for asked, used in ((8, 8), (None, 4096)):
        entry, request = entry_of("003:table2", ("ga", "ga_gatednorm"), no_tasks=True, calibration=asked)
        assert build_study("003:table2", entry, request).calibration == used
