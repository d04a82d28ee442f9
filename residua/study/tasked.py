"""The accuracy of a study's models on tasks, as `residua eval` measures it, into the folder of each run; with
`--quantize` in low precision as well.

The file is written after every task, so a study that is stopped goes on with the next one. Imports no plotting library,
so it can run where the models were trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.console import Console

from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.files import write_atomically
from residua.report.failure import tell
from residua.report.plain import outcome
from residua.report.terminal import Progress, ProgressBars, StageProgress
from residua.storage.checkpoint import checkpoints
from residua.study.config import Tasks
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.quantized import quantized_copy
from residua.study.runner import StudyInterrupted, stop_as_exception
from residua.study.runs import (
    ACCURACIES,
    Accuracies,
    RunRecord,
    TaskAccuracy,
    is_complete,
    measured_after,
    read_accuracies,
)

if TYPE_CHECKING:
    from residua.evaluate.accuracy import TaskScore
    from residua.evaluate.score import Scorer


class Questions(Protocol):
    """Tasks that are open."""

    @property
    def asked(self) -> Mapping[str, str]:
        """By name, what stands for the questions of a task: another value if they change."""

    def score(self, scorer: Scorer, name: str, progress: Progress) -> TaskAccuracy: ...


def open_questions(tasks: Tasks) -> Questions:
    """The tasks of a study; a name that does not exist is refused here, before anything is trained."""
    return _Harness(tasks) if tasks.folder is None else _Local(tasks, Path(tasks.folder))


class _Local:
    """Multiple-choice questions from files."""

    def __init__(self, tasks: Tasks, folder: Path) -> None:
        from residua.evaluate.tasks import open_tasks

        opened = open_tasks(folder, list(tasks.names), shots=tasks.shots, split=None, limit=tasks.limit)
        self._tasks = {task.name: task for task in opened}
        self.asked = {task.name: _digest([task.split, task.metric, task.questions]) for task in opened}

    def score(self, scorer: Scorer, name: str, progress: Progress) -> TaskAccuracy:
        from residua.evaluate.accuracy import score_task

        made: TaskScore = score_task(scorer, self._tasks[name], progress)
        return TaskAccuracy(
            value=made.reported.value, error=made.reported.error, metric=made.metric, chance=made.chance,
            questions=made.questions, asked=self.asked[name],
        )  # fmt: skip


class _Harness:
    """Tasks of lm-evaluation-harness; a group of ours has the worked examples of its paper."""

    def __init__(self, tasks: Tasks) -> None:
        from residua.evaluate.harness import find_tasks, runs_code
        from residua.evaluate.tasks import expand

        self._limit = tasks.limit
        self._shots = {
            name: wanted.shots if tasks.shots is None else tasks.shots for name, wanted in expand(tasks.names).items()
        }
        self._manager, names = find_tasks(list(tasks.names), allow_code=True)
        unsafe = next((name for name in names if runs_code(name, self._manager.task_index)), None)
        if unsafe is not None:
            raise UserError(
                f"{unsafe} runs the programs that the model writes, which a study does not do: score its runs with "
                "residua eval --allow-code."
            )
        self.asked = {name: _digest(["lm-eval", name, self._shots[name], tasks.limit]) for name in names}

    def score(self, scorer: Scorer, name: str, progress: Progress) -> TaskAccuracy:
        from residua.evaluate.harness import evaluate_with_harness, reported
        from residua.generate.generator import Generator

        generator = Generator(scorer.model, scorer.tokenizer)
        results = evaluate_with_harness(
            scorer, generator, [name], shots=self._shots[name], limit=self._limit, task_manager=self._manager
        )
        found = reported(results).get(name)
        if found is None:
            raise UserError(f"lm-eval reports no accuracy of {name}: choose a task of multiple-choice questions.")
        return TaskAccuracy(value=found.value, error=found.error, asked=self.asked[name])


class Recipes(NamedTuple):
    """The recipes in which tasks are scored as well, and the sequences that SmoothQuant is calibrated on."""

    recipes: Sequence[str] = ()
    calibration: int = 0


HIGH_ONLY = Recipes()


class Job(NamedTuple):
    """A task to score; in high precision if `recipe` is empty."""

    task: str
    recipe: str
    asked: str

    def __str__(self) -> str:
        return f"{self.task} in {self.recipe}" if self.recipe else self.task


def score_runs(questions: Questions, plan: StudyPlan, console: Console, low: Recipes = HIGH_ONLY) -> None:
    """Score the complete runs on the tasks that they lack; a task that cannot be had is told once and left out."""
    lost: set[str] = set()
    waiting = [(run, jobs) for run in plan.compared if (jobs := missing(run, questions, low))]
    with stop_as_exception(), ProgressBars(console) as bars:
        progress = bars.stages("tasks")
        try:
            for run, jobs in waiting:
                if todo := [job for job in jobs if job.task not in lost]:
                    lost |= score_run(run, questions, todo, console, progress, low.calibration)
        except KeyboardInterrupt:
            raise StudyInterrupted("Stopped while tasks were scored: the same command continues.") from None


def missing(run: PlannedRun, questions: Questions, low: Recipes = HIGH_ONLY) -> list[Job]:
    """What a complete run was not scored on; a run without weights cannot be."""
    if not _can_be_scored(run):
        return []
    known = _current(run)
    jobs = [Job(task, "", asked) for task, asked in questions.asked.items()]
    jobs += [
        Job(task, recipe, _digest([asked, recipe, low.calibration]))
        for recipe in low.recipes
        for task, asked in questions.asked.items()
    ]
    return [job for job in jobs if (found := known.get((job.recipe, job.task))) is None or found.asked != job.asked]


def refuse_other_questions(path: Path, questions: Questions, known: Mapping[PlannedRun, RunRecord]) -> None:
    """Refuse questions that differ from those of a saved run without weights here: it cannot be asked again."""
    for run, record in known.items():
        found = {} if record.accuracies is None or _can_be_scored(run) else record.accuracies.tasks
        for task, asked in questions.asked.items():
            if task in found and found[task].asked != asked:
                raise ConfigError(
                    f"{path} has {task} of {run.title} with other questions or worked examples, and its weights are "
                    "not here: use the same --task-dir, --shots and --limit, or name another file for --results."
                )


def _can_be_scored(run: PlannedRun) -> bool:
    return is_complete(run.folder, run.config) and bool(checkpoints(run.folder))


def score_run(
    run: PlannedRun,
    questions: Questions,
    jobs: Sequence[Job],
    console: Console,
    progress: StageProgress,
    calibration: int = 0,
) -> set[str]:
    """Score a run's last checkpoint on tasks and write accuracies.json; returns the tasks that could not be had."""
    from residua.evaluate.score import Scorer
    from residua.machine import choose_device
    from residua.quantize.calibration import CalibrationText
    from residua.storage.model_folder import open_model, place

    model, tokenizer = open_model(run.folder, "last")
    model = place(model, choose_device(run.config.train.device, "train.device"))
    found, lost = _current(run), set[str]()
    for recipe, group in groupby(jobs, key=lambda job: job.recipe):
        text = CalibrationText.of_run(run.config) if recipe else None
        scorer = Scorer(model if text is None else quantized_copy(model, recipe, text, calibration), tokenizer)
        for job in group:
            if job.task in lost:
                continue
            stage = f"{run.title}, {job}"
            try:
                scored = questions.score(scorer, job.task, _within(progress, stage))
            except (RuntimeError, ValueError) as problem:  # also out of memory
                tell(console, f"{job} was not scored", problem)
                lost.add(job.task)
                continue
            found[recipe, job.task] = scored.model_copy(update={"asked": job.asked})
            _write(run, questions, found)
            console.print(outcome(f"{stage}: {100 * scored.value:.1f} %"))
    return lost


Known = dict[tuple[str, str], TaskAccuracy]
"""By recipe, empty for high precision, and task."""


def _current(run: PlannedRun) -> Known:
    """What is known of the run as it is; one that was trained further is scored again."""
    found = read_accuracies(run.folder) if measured_after(run.folder, ACCURACIES) else None
    if found is None:
        return {}
    by_recipe = {"": found.tasks, **found.low}
    return {(recipe, task): score for recipe, tasks in by_recipe.items() for task, score in tasks.items()}


def _write(run: PlannedRun, questions: Questions, found: Known) -> None:
    by_recipe: dict[str, dict[str, TaskAccuracy]] = {"": {}}
    for (recipe, task), score in found.items():
        by_recipe.setdefault(recipe, {})[task] = score
    written = Accuracies(wanted=tuple(questions.asked), tasks=by_recipe.pop(""), low=by_recipe)
    write_atomically(run.folder / ACCURACIES, written.model_dump_json(indent=1) + "\n")


def _within(progress: StageProgress, stage: str) -> Progress:
    return lambda done, total: progress(stage, done, total)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
