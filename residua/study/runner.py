"""Trains the runs of a plan, each in its own process, several at a time. Complete runs are reused.

With a process per run, a crash in one does not affect the others, and an interrupted study continues from its
checkpoints when it is started again.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from residua.config.settings import ConfigError
from residua.files import write_atomically
from residua.machine import available_cores
from residua.study.config import StudyConfig
from residua.study.plan import CONFIGS, LOCK, LOGS, PlannedRun, StudyPlan, check_folders
from residua.study.runs import is_complete, latest, steps_done

POLL_SECONDS = 0.25
STOP_SECONDS = 120.0


class StudyInterrupted(RuntimeError):
    """The study was stopped by a signal; the message says how to continue."""


class Watcher(Protocol):
    """Gets the progress of the runs while a study trains."""

    def started(self, run: PlannedRun, step: int) -> None: ...
    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None: ...
    def finished(self, run: PlannedRun, problem: str) -> None: ...


@dataclass
class _Process:
    run: PlannedRun
    child: subprocess.Popen[bytes]
    log: Path


def run_plan(study: StudyConfig, plan: StudyPlan, out: Path, watcher: Watcher) -> dict[PlannedRun, str]:
    """Train every run of the plan to its end; returns the failed runs with the reason.

    Raises StudyInterrupted after SIGINT or SIGTERM, once every process has saved and ended.
    """
    with _own(out) as lock:
        check_folders(plan)
        waiting = [run for run in plan.runs if not is_complete(run.folder, run.config)]
        problems: dict[PlannedRun, str] = {}
        active: list[_Process] = []
        with _stop_as_exception():
            try:
                while waiting or active:
                    while waiting and len(active) < study.workers:
                        active.append(_start(waiting.pop(0), study, out, lock))
                        watcher.started(active[-1].run, steps_done(active[-1].run.folder))
                    time.sleep(POLL_SECONDS)
                    active = _poll(active, problems, watcher)
            except KeyboardInterrupt:
                _stop(active)
                done = sum(is_complete(run.folder, run.config) for run in plan.runs)
                raise StudyInterrupted(
                    f"Stopped with {done} of {len(plan.runs)} runs complete: the same command continues from here."
                ) from None
            except BaseException:
                _stop(active)
                raise
    return problems


def threads_per_run(study: StudyConfig) -> int:
    """CPU threads of each trainer: an equal share of the cores, at most OMP_NUM_THREADS."""
    share = max(1, available_cores() // study.workers)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return study.threads or (min(share, max(1, int(limit))) if limit.isdecimal() else share)


def _start(run: PlannedRun, study: StudyConfig, out: Path, lock: int) -> _Process:
    config, log = out / CONFIGS / f"{run.title}.toml", out / LOGS / f"{run.title}.log"
    for path in (config, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(config, run.config.to_toml())
    command = [sys.executable, "-m", "residua.cli.main", "train", str(config), "--out", str(run.folder)]
    if (run.folder / "config.toml").exists():
        command.append("--resume")
    environment = os.environ | {"OMP_NUM_THREADS": str(threads_per_run(study)), "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as file:
        # In a session of its own, Ctrl-C reaches only the study, which then stops its trainers. The inherited lock
        # keeps the folder locked while any trainer lives, even if the study itself is killed.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
    return _Process(run, child, log)


def _poll(active: list[_Process], problems: dict[PlannedRun, str], watcher: Watcher) -> list[_Process]:
    """Report progress, and return the processes that still run."""
    alive = []
    for process in active:
        code = process.child.poll()
        watcher.advanced(process.run, *latest(process.run.folder))
        if code is None:
            alive.append(process)
            continue
        problem = "" if is_complete(process.run.folder, process.run.config) else _problem(process, code)
        if problem:
            problems[process.run] = problem
        watcher.finished(process.run, problem)
    return alive


def _problem(process: _Process, code: int) -> str:
    """One sentence: how the trainer ended, the last line of its log, and where the log is."""
    lines = [line.strip() for line in process.log.read_text(encoding="utf-8", errors="replace").splitlines()]
    spoken = [line for line in lines if line]
    ending = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
    said = f": {spoken[-1]}" if spoken else ""
    return f"{ending}{said} (log: {process.log})"


def _stop(active: list[_Process]) -> None:
    """Ask every trainer to save and end; kill those that do not end in time."""
    for process in active:
        if process.child.poll() is None:
            process.child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for process in active:
        try:
            process.child.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.child.kill()
            process.child.wait()


@contextmanager
def _own(out: Path) -> Iterator[int]:
    """Lock the study's folder; refuse if another study holds it."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"{out} is in use by another study or one of its trainers: wait for it, or choose another --out."
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _stop_as_exception() -> Iterator[None]:
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
