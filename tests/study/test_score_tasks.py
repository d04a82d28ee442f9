"""Accuracies on tasks in a study: scored once per run and task, as `residua eval` does, and compared over seeds."""

import json
import math
import os
import statistics
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console

from residua.config.run import RunConfig
from residua.data import Dataset
from residua.errors import UserError
from residua.evaluate.results import Accuracy
from residua.evaluate.score import Scorer
from residua.evaluate.tasks import EXOFORMER, expand
from residua.study import StudyConfig
from residua.study import measurements as work
from residua.study.collect_results import collect
from residua.study.config import Tasks
from residua.study.extend_study import complete_records, with_earlier
from residua.study.measurements import TaskMeasurement, open_questions
from residua.study.plan import PlannedRun, StudyPlan, make_plan
from residua.study.records import ACCURACIES, INSPECTION, Accuracies, TaskAccuracy, read_measured
from residua.study.results import StudyResult
from residua.study.statistics import t_quantile
from residua.study.tables import markdown, side_tables
from residua.study.train_runs import StudyInterrupted
from tests.study.conftest import refusal
from tests.study.recorded import write_all
from tests.trained import train_run

QUIET = Console(quiet=True)
Scored = tuple[StudyConfig, StudyPlan, StudyResult]


def write_questions(folder: Path, name: str, questions: int) -> None:
    """A task whose right answer repeats the question."""
    folder.mkdir(exist_ok=True)
    words = ["depth", "layers", "model", "talk"]
    lines = [
        {"split": split, "question": words[i % 4], "choices": words, "answer": i % 4, "id": str(i)}
        for split, count in (("train", 2), ("validation", questions))
        for i in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def scored_run(tmp_path_factory: pytest.TempPathFactory) -> PlannedRun:
    folder = train_run(tmp_path_factory.mktemp("tasked"))
    return PlannedRun("prenorm", "tiny", 0, RunConfig.from_toml(folder / "config.toml"), folder)


@pytest.fixture
def trained(scored_run: PlannedRun) -> PlannedRun:
    """A trained run without accuracies."""
    (scored_run.folder / ACCURACIES).unlink(missing_ok=True)
    return scored_run


def accuracies(run: PlannedRun) -> Accuracies:
    return read_measured(run.folder / ACCURACIES, Accuracies)


@pytest.fixture
def asked(tmp_path: Path) -> Tasks:
    for name, questions in (("colours", 6), ("shapes", 8)):
        write_questions(tmp_path / "tasks", name, questions)
    return Tasks(names=("colours", "shapes"), folder=str(tmp_path / "tasks"), shots=1)


@pytest.mark.slow
def test_ctrl_c_while_scoring_prints_how_to_resume(
    trained: PlannedRun, asked: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> set[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(TaskMeasurement, "measure_run", interrupted)
    with pytest.raises(StudyInterrupted, match="run the same command to continue"):
        TaskMeasurement(open_questions(asked)).measure(StudyPlan({}, (trained,)), QUIET)


@pytest.mark.slow
def test_a_run_is_scored_like_by_residua_eval(
    trained: PlannedRun, asked: Tasks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trained import residua

    out = tmp_path / "scores.json"
    words = ("--tasks", "colours,shapes", "--task-dir", asked.folder, "--shots", 1, "--out", out)
    assert residua(monkeypatch, "eval", trained.folder, *words) == 0
    TaskMeasurement(open_questions(asked)).measure(StudyPlan({}, (trained,)), QUIET)
    found = accuracies(trained)
    assert found.wanted == ("colours", "shapes")
    for task in json.loads(out.read_text())["tasks"]:
        ours, theirs = found.tasks[task["task"]], task[task["metric"]]
        assert (ours.value, ours.error, ours.questions) == (theirs["value"], theirs["error"], task["questions"])
        assert ours.chance == 0.25
    assert found.mean_in() == statistics.fmean(task.value for task in found.tasks.values())


@pytest.mark.slow
def test_low_precision_scoring_uses_a_copy_of_the_model(
    trained: PlannedRun, asked: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, questions, scored = StudyPlan({}, (trained,)), open_questions(asked), []
    score = questions.score

    def counted(scorer: Scorer, name: str, progress: object) -> TaskAccuracy:
        with torch.no_grad():
            scored.append((name, float(scorer.model(torch.arange(8)[None]).square().sum())))
        return score(scorer, name, progress)

    monkeypatch.setattr(questions, "score", counted)
    low = (("fp8", "nvfp4+smooth"), 2)
    TaskMeasurement(questions, *low).measure(plan, QUIET)
    assert [name for name, _ in scored] == ["colours", "shapes"] * 3
    models = [square for _, square in scored]
    assert models[::2] == models[1::2] and len(set(models)) == 3, "as trained, in FP8, in NVFP4"
    found = accuracies(trained)
    assert list(found.low) == ["fp8", "nvfp4+smooth"]
    for recipe, tasks in found.low.items():
        assert found.mean_in(recipe) == statistics.fmean(each.value for each in tasks.values()), recipe
    assert found.mean_in("nvfp4") is None

    TaskMeasurement(questions, *low).measure(plan, QUIET)
    assert len(scored) == 6, "nothing is scored twice"
    TaskMeasurement(questions, ("fp8",), 3).measure(plan, QUIET)
    assert len(scored) == 8, "another calibration may give other numbers"
    TaskMeasurement(questions).measure(plan, QUIET)
    assert len(scored) == 8 and set(accuracies(trained).low) == {"fp8", "nvfp4+smooth"}, "and all are kept"


@pytest.mark.slow
def test_only_missing_or_changed_tasks_are_scored(
    trained: PlannedRun, asked: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[str] = []
    score = work._LocalTasks.score

    def counted(self: object, scorer: Scorer, name: str, progress: object) -> TaskAccuracy:
        scored.append(name)
        return score(self, scorer, name, progress)

    monkeypatch.setattr(work._LocalTasks, "score", counted)

    def again(tasks: Tasks) -> list[str]:
        scored.clear()
        TaskMeasurement(open_questions(tasks)).measure(StudyPlan({}, (trained,)), QUIET)
        return list(scored)

    assert again(asked.model_copy(update={"names": ("colours",)})) == ["colours"]
    assert again(asked) == ["shapes"], "a stopped study resumes with the next task"
    assert again(asked) == []
    write_questions(Path(asked.folder), "shapes", 9)
    assert again(asked) == ["shapes"], "different questions"
    assert again(asked.model_copy(update={"shots": 2})) == ["colours", "shapes"]
    later = (trained.folder / ACCURACIES).stat().st_mtime + 60
    os.utime(trained.folder / INSPECTION, (later, later))
    assert again(asked) == ["colours", "shapes"], "the run was trained further"


@pytest.mark.slow
def test_unavailable_task_is_reported_once(trained: PlannedRun, asked: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:

    class Partly:
        def __init__(self) -> None:
            self.asked = {"gone": "a", "there": "b"}

        def score(self, scorer: object, name: str, progress: object) -> TaskAccuracy:
            if name == "gone":
                raise UserError("lm-eval could not download a task")
            return TaskAccuracy(value=0.5, asked="b")

    printed = StringIO()
    TaskMeasurement(Partly()).measure(StudyPlan({}, (trained, trained)), Console(width=200, file=printed))
    assert printed.getvalue().count("gone was not scored: lm-eval could not download a task") == 1
    found = accuracies(trained)
    assert list(found.tasks) == ["there"]
    assert found.mean_in() is None, "no mean over some of the tasks"


@pytest.mark.slow
def test_a_run_without_weights_is_not_scored(plan: StudyPlan, out: Path, asked: Tasks) -> None:
    write_all(plan, lambda run, step: 3.0)
    TaskMeasurement(open_questions(asked)).measure(plan, QUIET)
    assert not list(out.rglob(ACCURACIES))


SHARES = {"prenorm": ((0.25, 0.50), (0.35, 0.50)), "mgr": ((0.45, 0.50), (0.59, 0.50))}


@pytest.fixture
def scored(study: StudyConfig, dataset: Dataset, out: Path) -> Scored:
    """Two variants and two seeds with known accuracies on two tasks."""
    asked = StudyConfig(**{**study.model_dump(), "variants": {"prenorm": ("prenorm",), "mgr": ("mgr",)}})
    plan = make_plan(asked, out, dataset)
    write_all(plan, lambda run, step: 3.0)
    for run in plan.runs:
        values = dict(zip(("arc", "piqa"), SHARES[run.variant][run.seed], strict=True))
        found = {name: TaskAccuracy(value=value, chance=0.25) for name, value in values.items()}
        (run.folder / ACCURACIES).write_text(Accuracies(wanted=tuple(values), tasks=found).model_dump_json())
    return asked, plan, collect(asked, plan, complete_records(plan, {}), {})


def test_accuracies_are_means_and_differences_are_paired(scored: Scored) -> None:
    prenorm, mgr = scored[2].variants
    assert list(prenorm.tasks) == ["mean", "arc", "piqa"] and prenorm.tasks["mean"].difference is None
    arc = mgr.tasks["arc"]
    assert arc.accuracy.value == pytest.approx(0.52)
    assert arc.accuracy.error == pytest.approx(statistics.stdev([0.45, 0.59]) / math.sqrt(2))
    assert mgr.tasks["mean"].accuracy.value == pytest.approx((0.475 + 0.545) / 2)
    assert arc.difference is not None and arc.difference.value == pytest.approx((0.20 + 0.24) / 2)
    half = t_quantile(0.975, 1) * statistics.stdev([0.20, 0.24]) / math.sqrt(2)
    assert (arc.difference.low, arc.difference.high) == pytest.approx((0.22 - half, 0.22 + half)) and arc.chance == 0.25


def test_accuracies_are_in_the_tables(scored: Scored) -> None:
    result = scored[2]
    text = markdown(result)
    assert "## tasks" in text and "| 52.00 ± 7.00 |" in text and "| +11.00 [" in text
    (table,) = side_tables(result, "tiny")
    assert [column.title for column in table.columns] == ["variant", "mean", "Δ mean [95 %]", "arc", "piqa"]
    assert "guessing gives 25.0" in table.columns[1].meaning


def test_accuracies_in_low_precision_are_in_a_table(scored: Scored) -> None:
    study, plan, _ = scored
    for run in plan.runs:
        found = Accuracies.model_validate_json((run.folder / ACCURACIES).read_text())
        low = {name: TaskAccuracy(value=task.value - 0.01 * (1 + run.seed)) for name, task in found.tasks.items()}
        lower = found.model_copy(update={"low": {"fp8": low, "nvfp4": {"arc": TaskAccuracy(value=0.1)}}})
        (run.folder / ACCURACIES).write_text(lower.model_dump_json())
    asked = study.model_copy(update={"quantize": ("fp8", "nvfp4")})
    result = collect(asked, plan, complete_records(plan, {}), {})
    mgr = result.variants[1]
    assert list(mgr.low_tasks) == ["fp8"], "one of two tasks gives no mean"
    assert mgr.low_tasks["fp8"].accuracy.value == pytest.approx(0.51 - 0.015)
    assert mgr.low_tasks["fp8"].change.value == pytest.approx(-0.015)
    _, table = side_tables(result, "tiny")
    assert [column.title for column in table.columns] == ["variant", "fp8", "Δ fp8 [95 %]"]
    assert "## tasks in low precision" in markdown(result) and "| 49.50 ± 3.00 | -1.50 [" in markdown(result)


def test_one_task_has_no_mean_and_unscored_runs_are_omitted(scored: Scored) -> None:
    study, plan, _ = scored
    first = next(run for run in plan.runs if run.variant == "mgr")
    part = {"piqa": TaskAccuracy(value=0.5)}
    (first.folder / ACCURACIES).write_text(Accuracies(wanted=("arc", "piqa"), tasks=part).model_dump_json())
    mgr = collect(study, plan, complete_records(plan, {}), {}).variants[1]
    assert (mgr.tasks["arc"].accuracy.count, mgr.tasks["piqa"].accuracy.count) == (1, 2)
    assert mgr.tasks["mean"].accuracy.count == 1
    for run in plan.runs:
        one = Accuracies(wanted=("arc",), tasks={"arc": TaskAccuracy(value=0.5)})
        (run.folder / ACCURACIES).write_text(one.model_dump_json())
    assert list(collect(study, plan, complete_records(plan, {}), {}).variants[0].tasks) == ["arc"]


def test_an_unknown_task_is_refused_before_anything_runs(dataset: Dataset, asked: Tasks, out: Path) -> None:
    arguments = ["prenorm", "mgr", "--data", dataset.path, "--out", out, "--task-dir", asked.folder]
    assert "holds no task colour: did you mean colours?" in refusal(*arguments, "--tasks", "colour")
    assert refusal(*arguments).startswith("--task-dir needs --tasks")
    assert not out.exists()


def test_a_rerun_keeps_its_tasks_and_adds_others(study: StudyConfig, tmp_path: Path) -> None:
    first = study.model_copy(update={"tasks": Tasks(names=("arc",), folder="tasks")})
    (tmp_path / "study.toml").write_text(first.to_toml())
    assert with_earlier(study, tmp_path).tasks == first.tasks

    def then(**keys: object) -> tuple[str, ...]:
        again = with_earlier(study.model_copy(update={"tasks": Tasks(**keys)}), tmp_path).tasks
        return again.names

    assert then(names=("piqa",), folder="tasks") == ("arc", "piqa")
    assert then(names=("piqa",), folder="tasks", shots=5) == ("piqa",), "asked in another way"
    assert StudyConfig(variants=["prenorm", "mgr"], tasks=["arc"]).tasks == Tasks(names=("arc",))


class Harness(ModuleType):
    """Stands in for `residua.evaluate.harness`, whose library takes seconds to import."""

    def __init__(self) -> None:
        super().__init__("harness")
        self.seen: list[tuple[list[str], int | None, int | None]] = []
        self.manager = SimpleNamespace(task_index="the index")

    def find_tasks(self, names: list[str], allow_code: bool) -> tuple[SimpleNamespace, list[str]]:
        return self.manager, list(expand(names))

    def runs_code(self, name: str, index: str) -> bool:
        return name == "mbpp" and index == "the index"

    def evaluate_with_harness(
        self, scorer: Scorer, generator: object, names: list[str], *, shots: int | None, limit: int | None,
        task_manager: object,
    ) -> dict[str, dict[str, float]]:  # fmt: skip
        assert task_manager is self.manager
        self.seen.append((names, shots, limit))
        return {names[0]: {"acc": 0.25}}

    def reported(self, results: dict[str, dict[str, float]]) -> dict[str, Accuracy]:
        return {name: Accuracy(found["acc"], 0.1) for name, found in results.items() if name != "gsm8k"}


@pytest.mark.slow
def test_harness_tasks_use_the_shots_of_their_group(monkeypatch: pytest.MonkeyPatch, trained: PlannedRun) -> None:
    harness, plan = Harness(), StudyPlan({}, (trained,))
    monkeypatch.setitem(sys.modules, "residua.evaluate.harness", harness)
    TaskMeasurement(open_questions(Tasks(names=("exoformer",), limit=7))).measure(plan, QUIET)
    assert harness.seen == [([task], 5, 7) for task in EXOFORMER]
    found = accuracies(trained)
    assert (found.tasks["piqa"].value, found.tasks["piqa"].error) == (0.25, 0.1)
    TaskMeasurement(open_questions(Tasks(names=("arc_easy", "gsm8k"), shots=3))).measure(plan, QUIET)
    assert harness.seen[6:] == [(["arc_easy"], 3, None), (["gsm8k"], 3, None)]
    found = accuracies(trained)
    assert found.wanted == ("arc_easy", "gsm8k") and "gsm8k" not in found.tasks
    with pytest.raises(ValueError, match="mbpp runs the programs that the model writes, which a study does not do"):
        open_questions(Tasks(names=("arc_easy", "mbpp")))
