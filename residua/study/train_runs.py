"""Announce the incomplete runs of a plan, train them, and show their progress.

Runs with the same graph share a process and its compiled code (`worker_pool.py`). A crash in one process does not
affect the others, and an interrupted study continues from its checkpoints when it is restarted.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from residua.config import variants
from residua.config.run import RunConfig, differences
from residua.config.settings import ConfigError, override_key
from residua.data import Dataset
from residua.files import lock, making, refuse_blocked, write_atomically, writing
from residua.machine import available_cores, python_environment
from residua.reading import counted
from residua.report.plain import outcome
from residua.report.terminal import clock, remaining
from residua.storage.checkpoint import checkpoints
from residua.storage.load import weights_fingerprint
from residua.storage.run import failed_early
from residua.study.config import StudyConfig
from residua.study.plan import (
    BEGUN,
    LOCK,
    RUNS,
    STARTED,
    STUDY,
    PlannedRun,
    StudyPlan,
    base_run,
    choose_rates,
    keep_rates,
    model_title,
    vary,
)
from residua.study.records import is_complete, read_environment, read_run, steps_done
from residua.study.statistics import count
from residua.study.worker_pool import Watcher, WorkerPool, compiling_ahead
from residua.train.environment import START, TEXT
from residua.train.world import graph_of

_RUN = re.compile(r"(.+?)(-(lr)?[\d.]+x)?-seed\d+")
"""The folder of a run: its model, and optionally a budget or rate."""


def announce(console: Console, study: StudyConfig, plan: StudyPlan) -> None:
    """Print the planned models and the changes from parameter matching."""
    first = plan.runs[0].config
    console.print(
        f"{counted(len(study.variants), 'variant')} × {counted(len(study.seeds), 'seed')}"
        f"{f' × {len(study.sizes)} sizes' if study.scaling else ''} = {counted(len(plan.compared), 'run')}, "
        f"{f'and {len(plan.ladder)} of the ladder, ' if plan.ladder else ''}"
        f"{f'and {len(plan.trials)} to tune learning rates, ' if plan.trials else ''}"
        f"{study.workers} at a time on {counted(threads_per_run(study), 'thread')} each",
        highlight=False,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("size", "variant", "parameters", "steps", "tokens", "matching"):
        table.add_column(title, justify="left" if title in ("size", "variant", "matching") else "right")
    rows = [(size, name, m.parameters, m.config, m.matching) for (size, name), m in plan.models.items()]
    rows += [
        (r.size, f"{r.variant}, ladder {r.budget:g}×", plan.models[r.size, r.variant].parameters, r.config, "")
        for r in plan.ladder
        if r.seed == study.seeds[0]
    ]
    for size, name, parameters, config, matching in rows:
        steps, tokens = str(config.train.steps), count(config.tokens)
        table.add_row(Text(size), Text(name), f"{parameters:,}", steps, tokens, matching or "unchanged")
    console.print(table)
    console.print(f"text: {first.data.path}, vocabulary {first.model.vocab_size:,}", highlight=False, soft_wrap=True)
    for sentence in (*cost_sentences(plan), *undone_sentences(study), *same_sentences(study, plan)):
        console.print(Text(f"• {sentence}"), soft_wrap=True)


def undone_sentences(study: StudyConfig) -> list[str]:
    """One sentence for each `set` change that a variant overrides."""
    base = base_run(study, study.sizes[0])
    return [
        f"--set {change} has no effect on {name}, which overrides it."
        for change in study.set
        if variants.holds(base, change)
        for name, entries in study.variants.items()
        if not variants.holds(vary(study, base, name), change)
        and override_key(change) not in map(override_key, entries)
    ]


def same_sentences(study: StudyConfig, plan: StudyPlan) -> list[str]:
    """One sentence for each variant that matching turned into the baseline."""
    return [
        f"{name}{f' at {size}' if len(study.sizes) > 1 else ''} is the same model as {study.baseline} after "
        f"matching ({model.matching}): use --match none to keep its settings."
        for (size, name), model in plan.models.items()
        if name != study.baseline and model.matching and model.config == plan.models[size, study.baseline].config
    ]


def left_out_sentences(study: StudyConfig, out: Path) -> list[str]:
    """A sentence if the folder has runs of variants that the study leaves out: its page will not show them."""
    planned = {model_title(study, size, name) for size in study.sizes for name in study.variants}
    trained = {match[1] for path in (out / RUNS).glob("*") if (match := _RUN.fullmatch(path.name))}
    others = sorted(trained - planned)
    if not others:
        return []
    it = "it" if len(others) == 1 else "them"
    return [
        f"{out} also contains {', '.join(others)}, which this study leaves out: name {it} too to include "
        f"{it} on the page."
    ]


def cost_sentences(plan: StudyPlan) -> list[str]:
    """Sentences on the cost of a learning-rate search and of a ladder, and on whether the ladder repeats text."""
    compared, trials = _new_tokens(plan.compared), _new_tokens(plan.trials)
    ladder = _new_tokens(plan.runs) - compared
    sentences = [
        f"{what} adds {count(added)} training tokens to the {count(compared)} of the comparison "
        f"({added / compared:+.0%})."
        for what, added in (("Tuning", trials), ("The ladder", ladder))
        if added
    ]
    largest = max(run.config.tokens for run in plan.runs)
    if plan.ladder and largest > plan.text_tokens:
        sentences.append(
            f"The largest budget reads the text {largest / plan.text_tokens:.1f} times. Repeated text teaches "
            "the baseline less than new text, which favours the variants."
        )
    return sentences


def _new_tokens(runs: Sequence[PlannedRun]) -> int:
    """Training tokens of these runs, counting once the tokens that a run shares with the longest of its family."""
    total, longest = 0, {run.family: run.config for run in sorted(runs, key=lambda run: run.config.train.steps)}
    for run in runs:
        steps, schedule = run.config.train.steps, run.config.train.schedule
        shared = 0 if steps == longest[run.family].train.steps else schedule.shared_steps(steps)
        total += (steps - shared) * run.config.tokens_per_step
    return total


def refuse_strangers(out: Path) -> None:
    """Refuse a folder that holds anything but a study, such as a training run."""
    refuse_blocked(out)
    if not out.exists() or (out / STUDY).exists():
        return
    others = sorted(path.name for path in out.iterdir() if path.name not in BEGUN)
    for name in others:
        if not name.endswith(".toml") or name == "config.toml":  # the folder may also contain the study file
            raise ConfigError(f"{out} contains {name}, which was not written by a study: choose another --out.")


def check_folders(runs: Iterable[PlannedRun]) -> None:
    """Refuse to reuse runs whose configuration differs from what this study needs, unless they hold no checkpoint."""
    for run in runs:
        written = run.folder / "config.toml"
        if not written.exists() or failed_early(run.folder):
            continue
        changed = differences(RunConfig.from_toml(written), run.config)
        about, path, start = read_environment(run.folder), run.config.data.path, run.config.train.start
        text, weights = about.get(TEXT), about.get(START)
        # the same text or the same weights may lie elsewhere now
        texts = changed.keys() & {"data.path", "data.tokenizer"}
        if texts and text and path is not None and text == Dataset.open(path).fingerprint:
            changed = {key: pair for key, pair in changed.items() if key not in texts}
        if "train.start" in changed and weights and start is not None and weights == weights_fingerprint(start):
            del changed["train.start"]
        for key, (old, new) in changed.items():
            raise ConfigError(
                f"{run.folder} has a run with {key} = {old!r}, but this study needs {new!r}: "
                "choose another --out, or move that folder elsewhere."
            )


def finish(study: StudyConfig, out: Path) -> None:
    """Mark the study in the folder as fully measured."""
    write_atomically(out / STUDY, study.to_toml())
    (out / STARTED).unlink(missing_ok=True)


class StudyInterrupted(RuntimeError):
    """The study was stopped by a signal; the message says how to continue."""


def run_plan(study: StudyConfig, plan: StudyPlan, out: Path, watcher: Watcher) -> dict[PlannedRun, str]:
    """Train every run of the plan to its end; returns the failed runs with their reasons.

    Raises StudyInterrupted after SIGINT or SIGTERM, once every process has saved and exited.
    """
    with _own(out) as lock:
        check_folders(plan.runs)
        write_atomically(out / STARTED, study.to_toml())
        waiting = [run for run in plan.runs if not is_complete(run.folder, run.config)]
        environment = python_environment(OMP_NUM_THREADS=str(threads_per_run(study)), PYTHONUNBUFFERED="1")
        # Workers inherit the lock, so the folder stays locked while any of them lives, even if the study itself is
        # killed.
        pool = WorkerPool(
            by_graph(waiting), study.workers, out, watcher, environment, keep_open=(lock,),
            ahead=compiling_ahead(),
        )  # fmt: skip
        with stop_as_exception():
            try:
                pool.work()
            except KeyboardInterrupt:
                pool.stop()
                done = sum(is_complete(run.folder, run.config) for run in plan.runs)
                raise StudyInterrupted(
                    f"Stopped with {done} of {counted(len(plan.runs), 'run')} complete: run the same command "
                    "to continue."
                ) from None
            except BaseException:
                pool.stop()
                raise
    return pool.problems


def by_graph(runs: Iterable[PlannedRun]) -> list[list[PlannedRun]]:
    """Group runs that can share compiled code, in plan order: seeds, learning rates and lengths of a variant."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(graph_of(run.config), []).append(run)
    return list(groups.values())


def threads_per_run(study: StudyConfig) -> int:
    """CPU threads of each trainer: an equal share of the cores, at most OMP_NUM_THREADS."""
    share = max(1, available_cores() // study.workers)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return study.threads or (min(share, max(1, int(limit))) if limit.isdecimal() else share)


@contextmanager
def _own(out: Path) -> Iterator[int]:
    """Lock the study's folder; refuse if another study holds it."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    busy = f"{out} is in use by another study or one of its trainers: wait for it, or choose another --out."
    descriptor = lock(out / LOCK, busy)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def lock_results(path: Path | None) -> Iterator[None]:
    """Lock a results file with a hidden file next to it, removed afterwards; refuse if a study holds it."""
    if path is None:
        yield
        return
    lock_file = path.with_name(f".{path.name}.lock")
    busy = (
        f"{path} is in use by another study: wait for it, or train without --results and add the runs later with "
        f"`residua compare FOLDER --results {path} --plan`."
    )
    with making(path.parent):
        descriptor = lock(lock_file, busy)
        while os.fstat(descriptor).st_nlink == 0:  # its last owner removed it before we got the lock
            os.close(descriptor)
            descriptor = lock(lock_file, busy)
        try:
            yield
        finally:
            lock_file.unlink(missing_ok=True)
            os.close(descriptor)


@contextmanager
def stop_as_exception() -> Iterator[None]:
    """Inside the block, SIGTERM raises KeyboardInterrupt like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous: Callable[[int, FrameType | None], object] | int | None
    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # only the main thread can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)


def tune_rates(study: StudyConfig, plan: StudyPlan, out: Path, console: Console) -> None:
    """Train the learning-rate trials, and store the rate chosen for each variant."""
    trials = replace(plan, runs=plan.trials)
    with LiveProgress(console, trials) as progress:
        problems = run_plan(study, trials, out, progress)
    rates = choose_rates(study, plan, problems)
    keep_rates(out, rates)
    for rate in rates:
        console.print(outcome(rate.sentence(len(study.sizes) > 1)))


class LiveProgress:
    """A Watcher that draws bars on a terminal; in a log it prints one line per finished run.

    It calls `after_each` once a run's result is printed.
    """

    def __init__(self, console: Console, plan: StudyPlan, after_each: Callable[[], object] = lambda: None) -> None:
        self._console, self._after_each = console, after_each
        self._logged = {run: steps_done(run.folder) for run in plan.runs}
        self._steps = {run: _begins_after(run, step) for run, step in self._logged.items()}
        self._total = sum(run.config.train.steps for run in plan.runs)
        self._start: tuple[float, int] | None = None  # time of the first reported step, and the steps done by then
        self._count = sum(not is_complete(run.folder, run.config) for run in plan.runs)  # skip complete runs
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
        """Show a bar for the run, reusing its old bar if it was started before. `step` is the last one logged."""
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
        if step <= self._steps[run]:  # the log was truncated at the checkpoint
            return
        self._steps[run] = step
        if self._start is None:  # the rate excludes start-up and compilation
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
        else:
            loss = read_run(run.folder, run.config).final_loss
            self._console.print(outcome(f"{run.title}: validation loss {loss:.4f}  ").append(self._status(), "dim"))
        self._after_each()

    def _status(self) -> str:
        done = sum(self._steps.values())
        seconds = None if self._start is None else remaining(*self._start, done, self._total)
        left = f", {clock(seconds)} left" if seconds else ""
        return f"{self._ended}/{counted(self._count, 'run')}{left}"


def _begins_after(run: PlannedRun, logged: int) -> int:
    """The step after which training resumes: the last checkpoint's, or the final step if that was logged."""
    if logged >= run.config.train.steps:
        return run.config.train.steps
    return max((checkpoint.step for checkpoint in checkpoints(run.folder)), default=0)
