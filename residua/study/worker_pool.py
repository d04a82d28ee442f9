"""The processes of a study. Each trains runs of one graph; the next one compiles while another trains.

A worker is sent one line of JSON per run and answers with one word a line: `ready` once it is compiled, `trained` after
the last step of a run, `ended CODE` when the files of that run are written. Between the two, another worker may already
train. `TrainingProcess` is the worker's side: it compiles for the run named on its command line, then trains those that
its standard input names. The trainer's output goes to the log of the run. The process ends when its input does: if
the study is killed, the run in progress is still finished.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from residua.config.plugins import causes, load_plugins
from residua.config.run import RunConfig
from residua.files import write_atomically, writing
from residua.machine import available_cores, python_command
from residua.report.failure import describe, ending, last_words, sentence, show
from residua.storage.checkpoint import prune
from residua.storage.run import failed_early
from residua.study.plan import CONFIGS, LOGS, PlannedRun
from residua.study.records import is_complete, latest, steps_done
from residua.train.health import Interrupted, TrainingStopped
from residua.train.timing import Stages
from residua.train.trainer import Branch, train
from residua.train.world import SharedWorld

READY, TRAINED, ENDED = "ready", "trained", "ended"
OUT_OF_MEMORY = 75
"""The status of a worker that ended because the GPU was full."""
POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
END_SECONDS = 20.0
CORES_TO_COMPILE = 8
MIN_FREE_BYTES = 1 << 16
"""With fewer bytes free on the disk, a trainer may not have been able to write its last words."""


class Watcher(Protocol):
    """Gets the progress of the runs while a study trains."""

    def started(self, run: PlannedRun, step: int) -> None: ...
    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None: ...
    def finished(self, run: PlannedRun, problem: str) -> None: ...


class Request(NamedTuple):
    """A run to train: its configuration file, its folder and its log.

    `branches` are the configuration files and folders of shorter runs that begin as this one.
    """

    config: str
    folder: str
    log: str
    branches: tuple[tuple[str, str], ...] = ()


def worker_command(first: Request) -> list[str]:
    """The command that starts a worker, which compiles for its first run at once."""
    call = "from residua.study.worker_pool import main; main()"
    return python_command("-c", call, first.config, first.log, repr(time.time()))


@dataclass(eq=False)
class Worker:
    """A process, the runs that wait for it, and the one that it works on."""

    child: subprocess.Popen[bytes]
    waiting: list[PlannedRun]
    log: Path
    ready: bool = False
    run: PlannedRun | None = None
    trains: bool = False
    """Whether it holds one of the places to train."""
    unfinished: bytes = b""
    logged: int = 0
    """Bytes that the log held before, written by earlier processes."""

    @property
    def done(self) -> bool:
        return not self.waiting and not self.trains

    def answers(self) -> Iterator[str]:
        assert self.child.stdout is not None
        with suppress(BlockingIOError):
            while part := os.read(self.child.stdout.fileno(), 4096):
                self.unfinished += part
        *lines, self.unfinished = self.unfinished.split(b"\n")
        yield from (line.decode() for line in lines)

    def send(self, request: Request) -> None:
        assert self.child.stdin is not None
        with suppress(OSError):  # it died: `_listen` will notice
            self.child.stdin.write(json.dumps(request._asdict()).encode() + b"\n")
            self.child.stdin.flush()

    def dismiss(self) -> None:
        """Tell it that no more runs will come."""
        assert self.child.stdin is not None
        with suppress(OSError):
            self.child.stdin.close()


@dataclass
class WorkerPool:
    """Trains runs in groups of one graph, `places` at a time; `environment` and `keep_open` are for the processes.

    With more places than groups, the largest groups are divided.
    """

    groups: list[list[PlannedRun]]
    places: int
    out: Path
    watcher: Watcher
    environment: dict[str, str]
    keep_open: Sequence[int] = ()
    ahead: int = 1
    """How many processes may compile or wait while others train."""
    command: Callable[[Request], list[str]] = worker_command
    problems: dict[PlannedRun, str] = field(default_factory=dict)
    _workers: list[Worker] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    def work(self) -> None:
        for folder in (CONFIGS, LOGS):
            with writing(self.out / folder):
                (self.out / folder).mkdir(parents=True, exist_ok=True)
        while self.groups or any(worker.run or worker.waiting for worker in self._workers):
            self._start()
            self._hand_out()
            self._listen()
        for worker in self._workers:
            self._end(worker, END_SECONDS)

    def stop(self) -> None:
        """Ask every worker to save and end; kill those that do not end in time."""
        for worker in self._workers:
            worker.dismiss()
            if worker.child.poll() is None:
                worker.child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            self._end(worker, max(0.1, deadline - time.monotonic()))

    def _start(self) -> None:
        """Start processes for the next groups, a few more than may train; divide a group if a place would be free."""
        while self.groups and self._busy() < self.places + self.ahead:
            self._begin(self.groups.pop(0))
        while not self.groups and self._busy() < self.places:
            spare, owner = max(((_spare(w), i) for i, w in enumerate(self._workers)), default=(0, 0))
            if spare < 1:
                return
            self._begin(_divide(self._workers[owner].waiting, (spare + 1) // 2))

    def _busy(self) -> int:
        return sum(not worker.done for worker in self._workers)

    def _begin(self, runs: list[PlannedRun]) -> None:
        first = _request(runs[0], self.out)
        for run in runs:
            write_atomically(Path(_request(run, self.out).config), run.config.to_toml())
        path = Path(first.log)
        with writing(path, within=path), path.open("ab") as log:
            logged = log.tell()
            # In a session of its own, Ctrl-C reaches only the study, which then stops its workers.
            child = subprocess.Popen(
                self.command(first), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environment,
                start_new_session=True, pass_fds=self.keep_open,
            )  # fmt: skip
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._workers.append(Worker(child, list(runs), path, logged=logged))
        self._note("starts", runs[0])

    def _hand_out(self) -> None:
        """Give the free places to workers that are ready, those that started first before the others."""
        free = self.places - sum(worker.trains for worker in self._workers)
        idle = (w for w in self._workers if w.ready and w.run is None and w.waiting)
        for worker, _ in zip(idle, range(free), strict=False):
            worker.run, worker.trains = worker.waiting.pop(0), True
            request = _request(worker.run, self.out, worker.waiting)
            if worker.log != Path(request.log):
                worker.log = Path(request.log)
                worker.logged = worker.log.stat().st_size if worker.log.exists() else 0
            self.watcher.started(worker.run, steps_done(worker.run.folder))
            self._note("trains", worker.run)
            worker.send(request)

    def _listen(self) -> None:
        """Wait a moment for answers, report progress, and drop the processes that have ended."""
        pipes = [worker.child.stdout for worker in self._workers if worker.child.stdout is not None]
        select.select(pipes, [], [], POLL_SECONDS)
        lost = []
        for worker in self._workers:
            code = worker.child.poll()  # before the answers: what a dead process said is complete
            for words in worker.answers():
                self._heard(worker, words)
            if worker.run is not None:
                self.watcher.advanced(worker.run, *latest(worker.run.folder))
            if code is not None:
                lost.append((worker, code))
        self._workers = [worker for worker in self._workers if all(worker is not dead for dead, _ in lost)]
        for worker, code in lost:
            self._lost(worker, code)

    def _heard(self, worker: Worker, words: str) -> None:
        word, _, code = words.partition(" ")
        if word == READY:
            worker.ready = True
            self._note("is compiled", worker.waiting[0])
        elif word == TRAINED:
            worker.trains = False
            self._note("is trained", worker.run)
        elif word == ENDED:
            self._finish(worker, int(code))

    def _finish(self, worker: Worker, code: int) -> None:
        assert worker.run is not None
        run, worker.run, worker.trains = worker.run, None, False
        self.watcher.advanced(run, *latest(run.folder))
        problem = "" if is_complete(run.folder, run.config) else _problem(worker.log, code, worker.logged)
        if problem:
            self.problems[run] = problem
        self.watcher.finished(run, problem)
        self._note("has ended", run)
        if not worker.waiting:
            worker.dismiss()

    def _lost(self, worker: Worker, code: int) -> None:
        """A process has ended: fail the run that it worked on or prepared for, and let others train the rest.

        A full GPU may be the fault of those that wait: they are ended, and the run starts again without them.
        """
        _close(worker)
        if code == OUT_OF_MEMORY and self.ahead:
            self.ahead = 0
            returned = [[*([worker.run] if worker.run else []), *worker.waiting]]
            for other in [w for w in self._workers if w.run is None]:
                other.child.terminate()
                self._end(other, END_SECONDS)
                self._workers.remove(other)
                returned.append(other.waiting)
            self.groups[:0] = [runs for runs in returned if runs]
            return
        if worker.run is None and worker.waiting:
            worker.run = worker.waiting.pop(0)
            self.watcher.started(worker.run, steps_done(worker.run.folder))
        if worker.run is not None:
            self._finish(worker, code)
        if worker.waiting:
            self.groups.insert(0, worker.waiting)

    def _end(self, worker: Worker, seconds: float) -> None:
        try:
            worker.child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            worker.child.kill()
            worker.child.wait()
        _close(worker)

    def _note(self, what: str, run: PlannedRun | None) -> None:
        """One line of logs/timeline.jsonl: when a run got how far."""
        line = {"seconds": round(time.monotonic() - self._begun, 2), "run": run.title if run else None, "event": what}
        # a study continues without it when the disk is full
        with suppress(OSError), (self.out / LOGS / "timeline.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compiling_ahead() -> int:
    """How many workers compile while others train: one, or two where there are cores for both."""
    return 2 if available_cores() >= 2 * CORES_TO_COMPILE else 1


def _spare(worker: Worker) -> int:
    """Runs that another process could train sooner than this one: not those that branch off its current run."""
    current = worker.run if worker.trains and worker.run is not None else worker.waiting[0] if worker.waiting else None
    return sum(run.family != current.family for run in worker.waiting) if current is not None else 0


def _divide(queue: list[PlannedRun], wanted: int) -> list[PlannedRun]:
    """Take at least `wanted` runs from the end of a queue, in their order; runs of one family stay together."""
    place = len(queue) - wanted
    while place and queue[place - 1].family == queue[place].family:
        place -= 1
    tail = queue[place:]
    del queue[place:]
    return tail


def _request(run: PlannedRun, out: Path, waiting: Sequence[PlannedRun] = ()) -> Request:
    """The request to train a run; waiting runs of its family branch off it."""
    family = [run, *(other for other in waiting if other.family == run.family)]
    files = [(str(out / CONFIGS / f"{each.title}.toml"), str(each.folder)) for each in family]
    return Request(*files[0], str(out / LOGS / f"{run.title}.log"), tuple(files[1:]))


def _problem(log: Path, code: int, since: int = 0) -> str:
    """One sentence: how the trainer ended, why by its log from byte `since` on, and where the log is."""
    words = last_words(log.read_bytes()[since:].decode(errors="replace")) if log.exists() else ""
    ending = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
    full = "; the disk is full" * (shutil.disk_usage(log.parent).free < MIN_FREE_BYTES)
    return f"{ending}{f': {words}'.removesuffix('.') * bool(words)}{full} (log: {log})"


def _close(worker: Worker) -> None:
    worker.dismiss()
    if worker.child.stdout is not None:
        worker.child.stdout.close()


def main() -> None:
    """Prepare for the configuration named on the command line, then train what the input names."""
    config, log, spawned = sys.argv[1:]
    answers = os.dup(sys.stdout.fileno())
    _print_to(Path(log))
    with ending():
        load_plugins()
    worker = TrainingProcess(partial(answer, answers))
    worker.stages.add("import", time.time() - float(spawned))
    worker.prepare(Path(config))
    since = time.perf_counter()
    for line in sys.stdin:
        worker.stages.add("wait", time.perf_counter() - since)
        request = Request(**json.loads(line))
        _print_to(Path(request.log))
        code = worker.train(request)
        with suppress(OSError):
            sys.stdout.flush()
        worker.answer(f"{ENDED} {code}")
        since = time.perf_counter()


def answer(pipe: int, words: str) -> None:
    """Answer the study. If it was killed, nobody listens, and the run continues."""
    with suppress(OSError):
        os.write(pipe, f"{words}\n".encode())


class TrainingProcess:
    """A worker seen from inside: it trains the runs that it is sent in turn, on one compiled step."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.answer = tell
        self.stages = Stages()
        self._world: SharedWorld | None = None

    def prepare(self, path: Path) -> None:
        """Compile for a run. The run itself reports errors."""
        try:
            config = RunConfig.from_toml(path)
            self._open(config).rehearse(config)
        except Exception as error:
            print(f"not compiled ahead: {sentence(error)}", flush=True)
            if self._world is not None:
                self._world.forget()
        self.answer(READY)

    def train(self, request: Request) -> int:
        """Train a run; returns the status that `residua train` would end with.

        A run that diverged, or that is refused, does not end the process; a full memory and a bug do.
        """
        folder = Path(request.folder)
        try:
            config = RunConfig.from_toml(request.config)
            branches = [Branch(Path(place), RunConfig.from_toml(path)) for path, place in request.branches]
            resume = (folder / "config.toml").exists() and not failed_early(folder)
            train(config, folder, resume=resume, world=self._open(config), branches=branches)
        except Exception as error:
            failure = describe(error, expected=isinstance(error, TrainingStopped))
            show(failure)
            if isinstance(error, Interrupted):
                sys.exit(error.exit_code)
            if any(isinstance(cause, torch.OutOfMemoryError) for cause in causes(error)):
                sys.exit(OUT_OF_MEMORY)
            if failure.bug:  # of which this process may be the worse
                sys.exit(1)
            return error.exit_code if isinstance(error, TrainingStopped) else 2
        prune(folder, keep=1)
        return 0

    def _open(self, config: RunConfig) -> SharedWorld:
        if self._world is None:
            self._world = SharedWorld.alone(config)
            self._world.trained = lambda: self.answer(TRAINED)
            self._world.stages = self.stages
        return self._world


def _print_to(log: Path) -> None:
    """Append what this process prints to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
