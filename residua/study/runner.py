"""Trains the runs of a plan that are not complete yet.

Runs of one graph share a process and its compiled code (`crew.py`). A crash in one process does not affect the others,
and an interrupted study continues from its checkpoints when it is started again.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from residua.config.settings import ConfigError
from residua.files import making, write_atomically, writing
from residua.machine import available_cores, python_environment
from residua.reading import counted
from residua.study.config import StudyConfig
from residua.study.crew import Crew, Watcher, compiling_ahead
from residua.study.plan import LOCK, STARTED, PlannedRun, StudyPlan, check_folders
from residua.study.runs import is_complete
from residua.train.world import graph_of


class StudyInterrupted(RuntimeError):
    """The study was stopped by a signal; the message says how to continue."""


def run_plan(study: StudyConfig, plan: StudyPlan, out: Path, watcher: Watcher) -> dict[PlannedRun, str]:
    """Train every run of the plan to its end; returns the failed runs with the reason.

    Raises StudyInterrupted after SIGINT or SIGTERM, once every process has saved and ended.
    """
    with _own(out) as lock:
        check_folders(plan.runs)
        write_atomically(out / STARTED, study.to_toml())
        waiting = [run for run in plan.runs if not is_complete(run.folder, run.config)]
        environment = python_environment(OMP_NUM_THREADS=str(threads_per_run(study)), PYTHONUNBUFFERED="1")
        # The inherited lock keeps the folder locked while any process lives, even if the study itself is killed.
        crew = Crew(
            by_graph(waiting), study.workers, out, watcher, environment, keep_open=(lock,),
            ahead=compiling_ahead(),
        )  # fmt: skip
        with stop_as_exception():
            try:
                crew.work()
            except KeyboardInterrupt:
                crew.stop()
                done = sum(is_complete(run.folder, run.config) for run in plan.runs)
                raise StudyInterrupted(
                    f"Stopped with {done} of {counted(len(plan.runs), 'run')} complete: "
                    "the same command continues from here."
                ) from None
            except BaseException:
                crew.stop()
                raise
    return crew.problems


def by_graph(runs: Iterable[PlannedRun]) -> list[list[PlannedRun]]:
    """Runs that can share compiled code, in the order of the plan: seeds, learning rates and lengths of a variant."""
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
    descriptor = _lock(
        out / LOCK, f"{out} is in use by another study or one of its trainers: wait for it, or choose another --out."
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def own_results(path: Path | None) -> Iterator[None]:
    """Lock a results file, by a hidden file beside it that is there only meanwhile; refuse if a study holds it."""
    if path is None:
        yield
        return
    beside = path.with_name(f".{path.name}.lock")
    refusal = (
        f"{path} is in use by another study: wait for it, or train without --results and add the runs later with "
        f"`residua compare FOLDER --results {path} --plan`."
    )
    with making(path.parent):
        descriptor = _lock(beside, refusal)
        while os.fstat(descriptor).st_nlink == 0:  # its last owner removed it before we had the lock
            os.close(descriptor)
            descriptor = _lock(beside, refusal)
        try:
            yield
        finally:
            beside.unlink(missing_ok=True)
            os.close(descriptor)


def _lock(path: Path, refusal: str) -> int:
    """Lock a file, which is made if need be; `refusal` says that another process holds it."""
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(refusal) from None
    return descriptor


@contextmanager
def stop_as_exception() -> Iterator[None]:
    """Inside the block, SIGTERM raises KeyboardInterrupt like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous: Callable[[int, FrameType | None], object] | int | None
    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not in the main thread, which alone can handle signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
