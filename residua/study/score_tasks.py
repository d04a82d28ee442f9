"""The accuracy of a study's models on tasks, as `residua eval` measures it; with `--quantize` in low precision as well.

The file in a run's folder is written after every task, so a stopped study resumes with the next one. Imports no
plotting library, so it can run where the models were trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.console import Console

from residua.config.settings import ConfigError
from residua.errors import UserError
from residua.files import write_atomically
from residua.report.failure import tell
from residua.report.plain import outcome
from residua.report.terminal import Progress, StageProgress
from residua.study.config import Tasks
from residua.study.measurements import RunMeasurement, has_weights, quantized_copy
from residua.study.plan import PlannedRun
from residua.study.records import ACCURACIES, Accuracies, RunRecord, TaskAccuracy, read_current

if TYPE_CHECKING:
    from residua.evaluate.results import TaskScore
    from residua.evaluate.score import Scorer


class Questions(Protocol):
    """Tasks that are open."""

    @property
    def asked(self) -> Mapping[str, str]:
        """By name, a digest of the questions of a task: another value if they change."""

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
        from residua.evaluate.results import score_task

        score: TaskScore = score_task(scorer, self._tasks[name], progress)
        return TaskAccuracy(
            value=score.reported.value, error=score.reported.error, metric=score.metric, chance=score.chance,
            questions=score.questions, asked=self.asked[name],
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
        score = reported(results).get(name)
        if score is None:
            raise UserError(f"lm-eval reports no accuracy of {name}: choose a task of multiple-choice questions.")
        return TaskAccuracy(value=score.value, error=score.error, asked=self.asked[name])


class Job(NamedTuple):
    """A task to score; in high precision if `recipe` is empty."""

    task: str
    recipe: str
    asked: str

    def __str__(self) -> str:
        return f"{self.task} in {self.recipe}" if self.recipe else self.task


class TaskMeasurement(RunMeasurement):
    """Scores the complete runs on the tasks that they lack; an unavailable task is reported once and skipped.

    `recipes` are those in which tasks are scored as well, `calibration` the sequences of SmoothQuant.
    """

    title, stopped = "tasks", "tasks were scored"

    def __init__(self, questions: Questions, recipes: Sequence[str] = (), calibration: int = 0) -> None:
        self._questions, self._recipes, self._calibration = questions, recipes, calibration
        self._lost: set[str] = set()

    def waits(self, run: PlannedRun) -> bool:
        return has_weights(run) and bool(self.missing(run))

    def missing(self, run: PlannedRun) -> list[Job]:
        """The tasks that a run was not scored on."""
        known, digests = _current(run), self._questions.asked
        jobs = [Job(task, "", questions) for task, questions in digests.items()]
        jobs += [
            Job(task, recipe, _digest([questions, recipe, self._calibration]))
            for recipe in self._recipes
            for task, questions in digests.items()
        ]
        return [job for job in jobs if (score := known.get((job.recipe, job.task))) is None or score.asked != job.asked]

    def measure_run(self, run: PlannedRun, console: Console, stages: StageProgress) -> str:
        from residua.evaluate.score import Scorer
        from residua.machine import choose_device
        from residua.quantize.evaluate import CalibrationText
        from residua.storage.model_folder import open_model, place

        jobs = [job for job in self.missing(run) if job.task not in self._lost]
        if not jobs:
            return ""
        model, tokenizer = open_model(run.folder, "last")
        model = place(model, choose_device(run.config.train.device, "train.device"))
        scores = _current(run)
        for recipe, group in groupby(jobs, key=lambda job: job.recipe):
            text = CalibrationText.of_run(run.config) if recipe else None
            copy = model if text is None else quantized_copy(model, recipe, text, self._calibration)
            scorer = Scorer(copy, tokenizer)
            for job in group:
                if job.task in self._lost:
                    continue
                stage = f"{run.title}, {job}"
                try:
                    score = self._questions.score(scorer, job.task, partial(stages, stage))
                except (RuntimeError, ValueError) as problem:  # also out of memory
                    tell(console, f"{job} was not scored", problem)
                    self._lost.add(job.task)
                    continue
                scores[recipe, job.task] = score.model_copy(update={"asked": job.asked})
                self._write(run, scores)
                console.print(outcome(f"{stage}: {100 * score.value:.1f} %"))
        return ""

    def _write(self, run: PlannedRun, scores: Scores) -> None:
        by_recipe: dict[str, dict[str, TaskAccuracy]] = {"": {}}
        for (recipe, task), score in scores.items():
            by_recipe.setdefault(recipe, {})[task] = score
        written = Accuracies(wanted=tuple(self._questions.asked), tasks=by_recipe.pop(""), low=by_recipe)
        write_atomically(run.folder / ACCURACIES, written.model_dump_json(indent=1) + "\n")


Scores = dict[tuple[str, str], TaskAccuracy]
"""By recipe, empty for high precision, and task."""


def _current(run: PlannedRun) -> Scores:
    """What is known of the run as it is; one that was trained further is scored again."""
    known = read_current(run.folder, ACCURACIES, Accuracies)
    by_recipe = {} if known is None else {"": known.tasks, **known.low}
    return {(recipe, task): score for recipe, tasks in by_recipe.items() for task, score in tasks.items()}


def refuse_other_questions(path: Path, questions: Questions, known: Mapping[PlannedRun, RunRecord]) -> None:
    """Refuse questions that differ from those of a saved run without weights here: it cannot be asked again."""
    for run, record in known.items():
        scores = {} if record.accuracies is None or has_weights(run) else record.accuracies.tasks
        for task, digest in questions.asked.items():
            if task in scores and scores[task].asked != digest:
                raise ConfigError(
                    f"{path} has {task} of {run.title} with other questions or worked examples, and its weights are "
                    "not here: use the same --task-dir, --shots and --limit, or name another file for --results."
                )


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
