"""The live view of a study: a bar for all runs with an ETA, and a line for each active run."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from residua.reading import counted
from residua.report.plain import outcome
from residua.report.terminal import clock, remaining
from residua.study.plan import PlannedRun, StudyPlan
from residua.study.runs import read_run, steps_done


class LiveProgress:
    """A Watcher that draws bars on a terminal; in a log it prints one line per finished run."""

    def __init__(self, console: Console, plan: StudyPlan) -> None:
        self._console = console
        self._steps = {run: min(steps_done(run.folder), run.config.train.steps) for run in plan.runs}
        self._total = sum(run.config.train.steps for run in plan.runs)
        self._before = sum(self._steps.values())
        self._start = time.monotonic()
        self._count, self._ended = len(plan.runs), sum(s >= r.config.train.steps for r, s in self._steps.items())
        self._tasks: dict[PlannedRun, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self._all = self._bars.add_task("all runs", total=self._total, completed=self._before, note="")

    def __enter__(self) -> LiveProgress:
        self._bars.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._bars.stop()

    def started(self, run: PlannedRun, step: int) -> None:
        """Show a bar for the run, or its old bar if it was started before."""
        if run in self._tasks:
            return
        note = f"from step {step}" if step else ""
        self._tasks[run] = self._bars.add_task(run.title, total=run.config.train.steps, completed=step, note=note)

    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None:
        """Move the run's bar and the bar of all runs."""
        if step == self._steps[run]:
            return
        self._steps[run] = step
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
        left = f", {clock(remaining(self._start, self._before, done, self._total))} left" if done < self._total else ""
        return f"{self._ended}/{counted(self._count, 'run')}{left}"
