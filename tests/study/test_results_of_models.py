"""Measurements of trained models in a results file: accuracies on tasks, outliers, low precision, inspections."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from residua.config.settings import ConfigError
from residua.data import Dataset
from residua.study import StudyConfig
from residua.study.config import Tasks
from residua.study.measurements import open_questions
from residua.study.page import show_saved
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.records import ACCURACIES, OUTLIERS, QUANTIZED, Accuracies, Outliers, QuantizedRun, TaskAccuracy
from residua.study.results import StudyResult
from residua.study.results_file import SavedStudy
from residua.study.run_study import run_study
from residua.study.tables import markdown
from tests.study.conftest import Choose, Trainer, choose, without_pages
from tests.study.recorded import look_inside
from tests.study.test_score_tasks import write_questions

pytestmark = pytest.mark.slow


def measure(run: PlannedRun, asked: dict[str, str]) -> None:
    """Files of a run as if its model had been inspected, and scored with FP8 as well."""
    tasks = {task: TaskAccuracy(value=0.25 + 0.1 * run.seed, asked=digest) for task, digest in asked.items()}
    low = {task: TaskAccuracy(value=0.125, asked="in fp8") for task in asked}
    losses: dict[str, float | None] = {"fp8": 4.5, "nvfp4": None}
    found = {
        ACCURACIES: Accuracies(wanted=tuple(asked), tasks=tasks, low={"fp8": low}),
        OUTLIERS: Outliers(peak_activation=100.0, sink_ratio=4.0, attention_sink=0.25, tokens=8192),
        QUANTIZED: QuantizedRun(calibration=4096, loss=4.0, peak_activation=100.0, sink_ratio=4.0, losses=losses),
    }
    for name, content in found.items():
        (run.folder / name).write_text(content.model_dump_json())


class Machine:
    """Trains at once, measures its runs if `measures` is set, and keeps no weights."""

    def __init__(self, patch: pytest.MonkeyPatch, dataset: Dataset, place: Path) -> None:
        self.trainer, self.place, self.measures = Trainer(), place, True
        self.results, self.tasks = place / "x.json", place / "tasks"
        self.choose: Choose = partial(choose, dataset)
        write_questions(self.tasks, "colours", 6)
        patch.setattr("residua.study.train_runs.run_plan", self._run_plan)
        patch.setattr("residua.study.run_study.write_report", without_pages)

    def ask(self, shots: int = 1, *names: str) -> Tasks:
        return Tasks(names=("colours", *names), folder=str(self.tasks), shots=shots)

    def compare(self, out: str, *variants: str, **keys: Any) -> StudyResult:
        study = self.choose(*variants, **{"quantize": ("fp8", "nvfp4"), **keys})
        return run_study(study, self.place / out, Console(quiet=True), self.results).result

    def _run_plan(self, study: StudyConfig, plan: StudyPlan, out: Path, watcher: Any) -> dict[PlannedRun, str]:
        before = set(self.trainer.trained)
        self.trainer(study, plan, out, watcher)
        for run in plan.runs:
            if self.measures and run.title not in before:
                measure(run, dict(open_questions(self.ask()).asked))
        return {}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, dataset: Dataset, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, dataset, tmp_path)


def test_the_file_has_every_measurement_and_question(machine: Machine, tmp_path: Path) -> None:
    result = machine.compare("first", "mgr", tasks=machine.ask())
    saved = SavedStudy.read(machine.results)
    assert saved.tasks == Tasks(names=("colours",), folder="local files", shots=1)
    assert str(tmp_path) not in saved.text() and "tasks" not in saved.study
    again = show_saved(saved)
    assert again == result.model_copy(update={"dataset": saved.dataset})
    for part in ("## tasks\n", "## tasks in low precision\n", "## outliers\n", "## low precision\n"):
        assert part in markdown(again)
    assert "| prenorm | 30.00 ± 5.00 |" in markdown(again) and not again.lacking
    plan = saved.plan(tmp_path / "first")
    for run, record in saved.records(plan).items():
        inside = look_inside(run)
        assert record.inspection is not None and record.inspection.keys() == inside.keys() - {"tokens"}
        rows = zip(record.inspection["sublayers"], inside["sublayers"], strict=True)
        assert all(ours["output_rms"] == float(f"{own['output_rms']:.3g}") for ours, own in rows)


def test_a_non_finite_number_does_not_corrupt_the_file(machine: Machine, tmp_path: Path) -> None:
    machine.compare("first", seeds=1)
    (path,) = (tmp_path / "first").rglob("inspection.json")
    first, *others = json.loads(path.read_text())["sublayers"]
    path.write_text(json.dumps({"sublayers": [{**first, "output_rms": float("nan")}, *others]}))
    machine.compare("first", seeds=1)
    (run,) = SavedStudy.read(machine.results).runs
    assert run.inspection is None and run.accuracies is not None


def test_seeds_can_be_added_and_unmeasured_runs_are_named(machine: Machine) -> None:
    machine.compare("first", seeds=1, tasks=machine.ask())
    (first,) = SavedStudy.read(machine.results).runs
    machine.measures = False
    result = machine.compare("second", seeds=2)  # another machine, which scores no tasks
    assert machine.trainer.trained == ["prenorm-seed0", "prenorm-seed1"]
    saved = SavedStudy.read(machine.results)
    assert saved.runs[0] == first and saved.runs[1].accuracies is None
    assert saved.tasks == machine.ask().anywhere
    assert result.lacking == {"tasks": ("prenorm-seed1",), "quantize": ("prenorm-seed1",)}
    assert result.variants[0].tasks["colours"].accuracy.count == 1
    told = "Accuracies on tasks are missing for prenorm-seed1: --tasks measures them on a machine with their weights."
    assert told in markdown(result).replace("\\", "") and told in markdown(show_saved(saved)).replace("\\", "")


def test_tasks_can_be_added_later_and_others_are_kept(machine: Machine) -> None:
    machine.measures = False
    assert machine.compare("first", seeds=1, quantize=()).lacking == {}
    assert machine.compare("first", seeds=1, quantize=(), tasks=machine.ask()).lacking == {"tasks": ("prenorm-seed0",)}
    write_questions(machine.tasks, "shapes", 4)
    shapes = machine.ask().model_copy(update={"names": ("shapes",)})
    machine.compare("elsewhere", seeds=1, quantize=(), tasks=shapes)
    assert SavedStudy.read(machine.results).tasks == machine.ask(1, "shapes").anywhere
    assert machine.trainer.trained == ["prenorm-seed0"]


def test_accuracies_on_other_questions_are_not_mixed(machine: Machine) -> None:
    machine.compare("first", seeds=1, tasks=machine.ask())
    before = machine.results.read_text()
    with pytest.raises(ConfigError, match="has colours of prenorm-seed0 with other questions or worked examples"):
        machine.compare("second", seeds=2, tasks=machine.ask(shots=2))
    assert machine.results.read_text() == before and machine.trainer.trained == ["prenorm-seed0"]


def test_missing_measurements_are_taken_from_the_file(machine: Machine, tmp_path: Path) -> None:
    machine.compare("first", seeds=1, tasks=machine.ask())
    folder, before = tmp_path / "first" / "runs" / "prenorm-seed0", SavedStudy.read(machine.results).runs
    for name in (ACCURACIES, OUTLIERS, QUANTIZED):
        (folder / name).unlink()
    assert machine.compare("first", seeds=1, tasks=machine.ask()).lacking == {}
    assert SavedStudy.read(machine.results).runs == before

    write_questions(machine.tasks, "shapes", 4)
    asked = open_questions(machine.ask(1, "shapes")).asked
    shapes = Accuracies(wanted=("shapes",), tasks={"shapes": TaskAccuracy(value=0.5, asked=asked["shapes"])})
    (folder / ACCURACIES).write_text(shapes.model_dump_json())
    fp8 = QuantizedRun(calibration=4096, loss=4.0, peak_activation=100.0, sink_ratio=4.0, losses={"fp8": 4.25})
    (folder / QUANTIZED).write_text(fp8.model_dump_json())
    result = machine.compare("first", seeds=1, tasks=machine.ask(1, "shapes"))
    (run,) = SavedStudy.read(machine.results).runs
    assert {task: found.value for task, found in run.accuracies.tasks.items()} == {"colours": 0.25, "shapes": 0.5}
    assert run.accuracies.low.keys() == {"fp8"} and run.quantized.losses == {"fp8": 4.25, "nvfp4": None}
    assert result.lacking == {"tasks": ("prenorm-seed0",)}  # shapes in FP8


def test_recipes_with_another_calibration_are_not_mixed() -> None:
    ours, other = (
        QuantizedRun(calibration=size, loss=4.0, peak_activation=1.0, sink_ratio=1.0, losses={name: 4.5})
        for size, name in ((1, "fp8"), (2, "nvfp4"))
    )
    assert ours.filled(other) == ours
