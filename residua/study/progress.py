"""The live view of a study: a bar for all runs with an ETA, and a line for each active run."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from residua.reading import counted
from residua.report.plain import outcome
from residua.report.terminal import clock, remaining
from residua.storage.checkpoint import checkpoints
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import is_complete, read_run, steps_done


class LiveProgress:
    """A Watcher that draws bars on a terminal; in a log it prints one line per finished run."""

    def __init__(self, console: Console, plan: StudyPlan) -> None:
        self._console = console
        self._logged = {run: steps_done(run.folder) for run in plan.runs}
        self._steps = {run: _begins_after(run, step) for run, step in self._logged.items()}
        self._total = sum(run.config.train.steps for run in plan.runs)
        self._start: tuple[float, int] | None = None  # when the first step was reported, and how many were done then
        self._count = sum(not is_complete(run.folder, run.config) for run in plan.runs)  # complete ones are not trained
        self._ended = 0
        self._tasks: dict[PlannedRun, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self._all = self._bars.add_task("all runs", total=self._total, completed=sum(self._steps.values()), note="")

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._bars.stop()

    def started(self, run: PlannedRun, step: int) -> None:
        """Show a bar for the run, or its old bar if it was started before. `step` is the last one logged."""
        self._logged[run], self._steps[run] = step, _begins_after(run, step)
        if run in self._tasks:
            return
        done = self._steps[run]
        note = f"from step {done}" if done else ""
        self._tasks[run] = self._bars.add_task(run.title, total=run.config.train.steps, completed=done, note=note)

    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None:
        """Move the run's bar and the bar of all runs."""
        if step == self._logged[run]:
            return
        self._logged[run] = step
        if step <= self._steps[run]:  # the log was cut back to the checkpoint
            return
        self._steps[run] = step
        if self._start is None:  # starting and compiling are not part of the rate
            self._start = time.monotonic(), sum(self._steps.values())
        note = f"step {step}/{run.config.train.steps}" + (f", loss {loss:.3f}" if loss is not None else "")
        self._bars.update(self._tasks[run], completed=step, note=note)
        self._bars.update(self._all, completed=sum(self._steps.values()), note=self._status())

    def finished(self, run: PlannedRun, problem: str) -> None:
        """Remove the run's bar and print its result or problem."""
        self._ended += 1
        self._steps[run] = run.config.train.steps
        self._bars.remove_task(self._tasks.pop(run))
        self._bars.update(self._all, completed=sum(self._steps.values()), note=self._status())
        if problem:
            self._console.print(outcome(f"{run.title}: {problem}", good=False))
            return
        loss = read_run(run.folder, run.config).final_loss
        self._console.print(outcome(f"{run.title}: validation loss {loss:.4f}  ").append(self._status(), "dim"))

    def _status(self) -> str:
        done = sum(self._steps.values())
        seconds = None if self._start is None else remaining(*self._start, done, self._total)
        left = f", {clock(seconds)} left" if seconds else ""
        return f"{self._ended}/{counted(self._count, 'run')}{left}"


def _begins_after(run: PlannedRun, logged: int) -> int:
    """The step that training goes on after: the last checkpoint's, or all of them if the last step was logged."""
    if logged >= run.config.train.steps:
        return run.config.train.steps
    return max((checkpoint.step for checkpoint in checkpoints(run.folder)), default=0)
