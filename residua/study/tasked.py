"""The accuracy of a study's models on tasks, as `residua eval` measures it, into the folder of each run.

The file is written after every task, so a study that is stopped goes on with the next one. Imports no plotting library,
so it can run where the models were trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from residua.files import write_atomically
from residua.report.plain import outcome
from residua.report.terminal import Progress, ProgressBars, StageProgress, say
from residua.storage.checkpoint import checkpoints
from residua.study.config import Tasks
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import ACCURACIES, Accuracies, TaskAccuracy, is_complete, measured_after, read_accuracies

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
            raise ValueError(
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
            raise ValueError(f"lm-eval reports no accuracy of {name}: choose a task of multiple-choice questions.")
        return TaskAccuracy(value=found.value, error=found.error, asked=self.asked[name])


def score_runs(questions: Questions, plan: StudyPlan, console: Console) -> None:
    """Score the complete runs on the tasks that they lack; a task that cannot be had is told once and left out."""
    lost: set[str] = set()
    waiting = [(run, names) for run in plan.compared if (names := missing(run, questions))]
    with ProgressBars(console) as bars:
        progress = bars.stages("tasks")
        for run, names in waiting:
            if todo := [name for name in names if name not in lost]:
                lost |= score_run(run, questions, todo, console, progress)


def missing(run: PlannedRun, questions: Questions) -> list[str]:
    """The tasks that a complete run was not scored on; a run without weights cannot be."""
    if not is_complete(run.folder, run.config) or not checkpoints(run.folder):
        return []
    known = _current(run)
    return [name for name, asked in questions.asked.items() if name not in known or known[name].asked != asked]


def score_run(
    run: PlannedRun, questions: Questions, names: list[str], console: Console, progress: StageProgress
) -> set[str]:
    """Score a run's last checkpoint on tasks and write accuracies.json; returns the tasks that could not be had."""
    from residua.evaluate.score import Scorer
    from residua.machine import choose_device
    from residua.storage.opening import open_model, place

    model, tokenizer = open_model(run.folder, "last")
    scorer = Scorer(place(model, choose_device(run.config.train.device, "train.device")), tokenizer)
    found: dict[str, TaskAccuracy] = _current(run)
    lost: set[str] = set()
    for name in names:
        stage = f"{run.title}, {name}"
        try:
            found[name] = questions.score(scorer, name, _within(progress, stage))
        except (RuntimeError, ValueError) as problem:  # also out of memory
            console.print(outcome(f"{name} was not scored: {say(problem)}", good=False))
            lost.add(name)
            continue
        _write(run, questions, found)
        console.print(outcome(f"{stage}: {100 * found[name].value:.1f} %"))
    return lost


def _current(run: PlannedRun) -> dict[str, TaskAccuracy]:
    """What is known of the run as it is; one that was trained further is scored again."""
    found = read_accuracies(run.folder) if measured_after(run.folder, ACCURACIES) else None
    return {} if found is None else dict(found.tasks)


def _write(run: PlannedRun, questions: Questions, found: dict[str, TaskAccuracy]) -> None:
    written = Accuracies(wanted=tuple(questions.asked), tasks=found)
    write_atomically(run.folder / ACCURACIES, written.model_dump_json(indent=1) + "\n")


def _within(progress: StageProgress, stage: str) -> Progress:
    return lambda done, total: progress(stage, done, total)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
