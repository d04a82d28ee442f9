"""A process of a study: it trains the runs that it is sent, one after the other, all on one compiled step.

It compiles for the run named on its command line, then trains those that its standard input names, and answers on its
standard output (`crew.py` is the other side). What the trainer prints goes to the log of the run. The process ends when
its input does: if the study is killed, the run in progress is still finished.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from residua.config.plugins import causes, load_plugins
from residua.config.run import RunConfig
from residua.report.failure import describe, ending, sentence, show
from residua.storage.checkpoint import prune
from residua.storage.run import failed_early
from residua.study.crew import ENDED, OUT_OF_MEMORY, READY, TRAINED, Request
from residua.train.health import Interrupted, TrainingStopped
from residua.train.timing import Stages
from residua.train.trainer import Branch, train
from residua.train.world import SharedWorld


def main() -> None:
    """Prepare for the configuration named on the command line, then train what the input names."""
    config, log, spawned = sys.argv[1:]
    answers = os.dup(sys.stdout.fileno())
    _print_to(Path(log))
    with ending():
        load_plugins()
    worker = _Worker(partial(tell, answers))
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


def tell(pipe: int, words: str) -> None:
    """Answer the study. If it was killed, nobody listens, and the run goes on."""
    with suppress(OSError):
        os.write(pipe, f"{words}\n".encode())


class _Worker:
    def __init__(self, answer: Callable[[str], None]) -> None:
        self.answer = answer
        self.stages = Stages()
        self._world: SharedWorld | None = None

    def prepare(self, path: Path) -> None:
        """Compile for a run. What goes wrong here is reported by the run itself."""
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
