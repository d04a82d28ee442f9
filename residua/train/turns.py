"""Times training steps in turns: a machine's speed drifts, but the ratios within a round hardly do.

Every model is built and compiled in its own process and then waits; only one process runs at a time. Such a process
calls `take_turns` and answers in lines of JSON, each after the word ANSWER. The first answer is the seconds of its
first step, or a problem. Then, for every number that it reads, it answers with the seconds of that many steps, and at
the end with memory and loss.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig
from residua.errors import UserError
from residua.machine import TooLarge, out_of_memory, python_environment
from residua.report.failure import last_words
from residua.train.step import Step
from residua.train.timing import first_step, peak_memory_gib, time_each

ANSWER = "ANSWER "
UNGRAPHED = re.compile(r"this \w+ cannot be captured as a CUDA graph.*")
"""A warning of `compile.cuda_graphs`: what was timed is slower than it could be."""
PATIENCE = 5.0
"""Seconds that a process has to clean up before it is killed."""


class Turn:
    """A model in its own process."""

    def __init__(self, title: str, child: subprocess.Popen[str], log: Path) -> None:
        self.title, self.child, self.log = title, child, log

    def ask(self, steps: int) -> list[float]:
        """Run `steps` steps; returns the seconds of each."""
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended; `answer` reports how
            self.child.stdin.write(f"{steps}\n")
            self.child.stdin.flush()
        return self.answer()  # type: ignore[no-any-return]

    def end(self) -> dict[str, Any]:
        """Memory and loss; afterwards the worker accepts no more requests."""
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):
            self.child.stdin.close()
        return self.answer()  # type: ignore[no-any-return]

    def warnings(self) -> list[str]:
        """The warnings of this process that it runs without a CUDA graph."""
        return UNGRAPHED.findall(self.log.read_text(errors="replace"))

    def answer(self) -> Any:
        """The next answer; skips output of libraries in between."""
        for line in self.child.stdout or ():
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        ending = self.child.wait()
        reason = last_words(self.log.read_text(errors="replace")) or "no error message"
        raise UserError(f"{self.title} could not be timed (exit status {ending}): {reason}")


@contextmanager
def open_turn(title: str, command: Sequence[str], log: Path) -> Iterator[Turn]:
    """Start a process that calls `take_turns`; it ends with the `with` block. Its messages go to `log`."""
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=python_environment()
        )
    try:
        yield Turn(title, child, log)
    finally:
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # unread output
                pipe.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        child.kill()
        child.wait()


def take_turns(build: Callable[[], Step], config: RunConfig, warmup: int) -> None:
    """Build, compile and warm up a step in this process, then time it when asked."""
    with no_memory() as problem:
        trained = build()
        device = trained.device
        step, first = first_step(trained, config)
        time_each(step, warmup, device)

    def peak() -> float | None:
        return peak_memory_gib(device) if device.type == "cuda" else None

    if problem:
        _tell({"problem": problem[0]})
        return
    _tell({"first": first, "memory_gib": peak()})
    for line in sys.stdin:
        _tell(time_each(step, int(line), device))
    totals = trained.totals()
    _tell({"memory_gib": peak(), "loss": totals.loss / totals.steps})


@contextmanager
def no_memory() -> Iterator[list[str]]:
    """A list that receives the problem if the model or its step is too large for this machine."""
    problem: list[str] = []
    try:
        yield problem
    except TooLarge:
        problem.append("larger than memory")
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error) is None:
            raise
        problem.append("out of memory")


def _tell(what: object) -> None:
    print(ANSWER + json.dumps(what), flush=True)
