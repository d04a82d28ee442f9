"""The processes of a study. Each trains runs of one graph; the next compiles while another trains.

The study sends a worker one line of JSON per run. The worker answers, one message a line: `ready` once compiled,
`trained` after the last step of a run, `ended CODE` when that run's files are written. Between the last two, another
worker may already train. `TrainingProcess` is the worker's side: it compiles for the run named on its command line,
then trains those named on its standard input. The trainer's output goes to the run's log. The process ends when its
input does: if the study is killed, the run in progress is still finished.
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
"""The exit status of a worker that ran out of GPU memory."""
POLL_SECONDS = 0.25
STOP_SECONDS = 120.0
END_SECONDS = 20.0
CORES_TO_COMPILE = 8
MIN_FREE_BYTES = 1 << 16
"""With fewer free bytes on the disk, a trainer may have failed to log its last message."""


class Watcher(Protocol):
    """Receives the progress of runs while a study trains."""

    def started(self, run: PlannedRun, step: int) -> None: ...
    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None: ...
    def finished(self, run: PlannedRun, problem: str) -> None: ...


class Request(NamedTuple):
    """A run to train: its configuration file, its folder and its log.

    `branches` are the configuration files and folders of shorter runs that branch off this one.
    """

    config: str
    folder: str
    log: str
    branches: tuple[tuple[str, str], ...] = ()


def worker_command(first: Request) -> list[str]:
    """The command that starts a worker, which immediately compiles for its first run."""
    call = "from residua.study.worker_pool import main; main()"
    return python_command("-c", call, first.config, first.log, repr(time.time()))


@dataclass(eq=False)
class Worker:
    """A process, its waiting runs, and the run in progress."""

    child: subprocess.Popen[bytes]
    waiting: list[PlannedRun]
    log: Path
    ready: bool = False
    run: PlannedRun | None = None
    trains: bool = False
    """Whether it holds one of the training slots."""
    unfinished: bytes = b""
    logged: int = 0
    """Bytes already in the log from earlier processes."""

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
        """Tell it that there are no more runs."""
        assert self.child.stdin is not None
        with suppress(OSError):
            self.child.stdin.close()


@dataclass
class WorkerPool:
    """Trains runs in groups of one graph, `places` at a time; passes `environment` and `keep_open` to the processes.

    With more places than groups, the largest groups are split.
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
        """Ask every worker to save and exit; kill those that do not exit in time."""
        for worker in self._workers:
            worker.dismiss()
            if worker.child.poll() is None:
                worker.child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers:
            self._end(worker, max(0.1, deadline - time.monotonic()))

    def _start(self) -> None:
        """Start processes for the next groups, a few more than may train; split a group if a place would stay free."""
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
            # The worker gets its own session, so Ctrl-C reaches only the study, which then stops its workers.
            child = subprocess.Popen(
                self.command(first), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self.environment,
                start_new_session=True, pass_fds=self.keep_open,
            )  # fmt: skip
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._workers.append(Worker(child, list(runs), path, logged=logged))
        self._note("starts", runs[0])

    def _hand_out(self) -> None:
        """Give free places to ready workers, the earliest started first."""
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
        """Wait briefly for answers, report progress, and drop processes that have ended."""
        pipes = [worker.child.stdout for worker in self._workers if worker.child.stdout is not None]
        select.select(pipes, [], [], POLL_SECONDS)
        lost = []
        for worker in self._workers:
            code = worker.child.poll()  # poll before reading: if it has died, its output is complete
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
        """Handle a process that ended: fail the run it was training or compiling for, and let others train the rest.

        If the GPU was full, waiting workers may be the cause: they are ended, and the run restarts without them.
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
        """Log an event of a run to logs/timeline.jsonl."""
        line = {"seconds": round(time.monotonic() - self._begun, 2), "run": run.title if run else None, "event": what}
        # when the disk is full, the study continues without it
        with suppress(OSError), (self.out / LOGS / "timeline.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def compiling_ahead() -> int:
    """How many workers compile while others train: one, or two if there are enough cores."""
    return 2 if available_cores() >= 2 * CORES_TO_COMPILE else 1


def _spare(worker: Worker) -> int:
    """The number of runs that another process could take over: not those that branch off the current run."""
    current = worker.run if worker.trains and worker.run is not None else worker.waiting[0] if worker.waiting else None
    return sum(run.family != current.family for run in worker.waiting) if current is not None else 0


def _divide(queue: list[PlannedRun], wanted: int) -> list[PlannedRun]:
    """Take at least `wanted` runs from the end of a queue, preserving order; runs of one family stay together."""
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
    """One sentence: how the trainer ended, the reason in its log after byte `since`, and where the log is."""
    words = last_words(log.read_bytes()[since:].decode(errors="replace")) if log.exists() else ""
    ending = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
    full = "; the disk is full" * (shutil.disk_usage(log.parent).free < MIN_FREE_BYTES)
    return f"{ending}{f': {words}'.removesuffix('.') * bool(words)}{full} (log: {log})"


def _close(worker: Worker) -> None:
    worker.dismiss()
    if worker.child.stdout is not None:
        worker.child.stdout.close()


def main() -> None:
    """Compile for the configuration named on the command line, then train the runs named on standard input."""
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
    """Answer the study. If the study was killed, the answer is lost and the run continues."""
    with suppress(OSError):
        os.write(pipe, f"{words}\n".encode())


class TrainingProcess:
    """The worker's side: trains the runs it receives in turn, with one compiled step."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.answer = tell
        self.stages = Stages()
        self._world: SharedWorld | None = None

    def prepare(self, path: Path) -> None:
        """Compile for a run; errors are left for the run itself to report."""
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

        A diverged or refused run does not end the process; running out of memory and bugs do.
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
            if failure.bug:  # this process may be in a bad state
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
    """Append this process's output to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
