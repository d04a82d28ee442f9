"""Training steps of several cases that take turns: a machine's speed drifts, and the ratios within a round hardly do.

Every case is built and compiled in a process of its own, side by side with the others; then they take turns, a few
steps each, and nothing else runs meanwhile. All of them are in memory at once.
`python -m residua.bench.turns CONFIG.toml BACKEND WARMUP [WAY]` is such a process. It answers in lines of JSON, each
after the word ANSWER: the seconds of its first step, then, for every number it reads, the seconds of so many steps,
and at the end memory and loss.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from residua import ops
from residua.bench.step import Case, StepResult, build_case, describe, no_memory
from residua.config.run import RunConfig
from residua.errors import UserError
from residua.machine import choose_device, python_command, python_environment
from residua.report.failure import ending, last_words
from residua.train.timing import RATE, TimedStep, peak_memory_gib, random_batches, synchronize, time_each

ANSWER = "ANSWER "
PATIENCE = 5.0
"""Seconds that a process may take to close what it opened."""


def bench_turns(
    cases: Sequence[Case],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    tell: Callable[[str], object] = lambda text: None,
) -> list[StepResult]:
    """Time `rounds` turns of `steps` steps of each case, on the same random tokens; `tell` gets a line about it."""
    with TemporaryDirectory() as folder, ExitStack() as open_cases:
        turns = [
            open_cases.enter_context(_process(case, Path(folder) / str(number), warmup))
            for number, case in enumerate(cases)
        ]
        firsts = []
        for case, child in zip(cases, turns, strict=True):
            tell(f"{case.name}: first step")
            firsts.append(child.answer())
        seconds: list[list[float]] = [[] for _ in cases]
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            for child, first, times in zip(turns, firsts, seconds, strict=True):
                if "problem" not in first:
                    times += child.ask(steps)
        return [_result(*of) for of in zip(cases, turns, firsts, seconds, strict=True)]


class _Turn:
    """A case in its process."""

    def __init__(self, case: Case, child: subprocess.Popen[str], log: Path) -> None:
        self.case, self.child, self.log = case, child, log

    def ask(self, steps: int) -> Any:
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `answer` says how
            self.child.stdin.write(f"{steps}\n")
            self.child.stdin.flush()
        return self.answer()

    def end(self) -> Any:
        assert self.child.stdin is not None
        with suppress(BrokenPipeError):
            self.child.stdin.close()
        return self.answer()

    def answer(self) -> Any:
        """The next answer; output of libraries in between is skipped."""
        for line in self.child.stdout or ():
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        ending = self.child.wait()
        reason = last_words(self.log.read_text(errors="replace")) or "it said nothing"
        raise UserError(f"{self.case.name} could not be timed (exit status {ending}): {reason}")


@contextmanager
def _process(case: Case, place: Path, warmup: int) -> Iterator[_Turn]:
    path, log = place.with_suffix(".toml"), place.with_suffix(".log")
    path.write_text(case.config.to_toml(), encoding="utf-8")
    way = [] if case.way is None else [case.way]
    command = python_command("-m", "residua.bench.turns", str(path), case.backend, str(warmup), *way)
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=python_environment()
        )
    try:
        yield _Turn(case, child, log)
    finally:
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # what was not read any more
                pipe.close()  # type: ignore[union-attr]
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        child.kill()
        child.wait()


def _result(case: Case, child: _Turn, first: dict[str, Any], seconds: list[float]) -> StepResult:
    if "problem" in first:
        return describe(case, first["problem"])
    end = child.end()
    return describe(case, TimedStep(first["first"], seconds, end["memory_gib"], end["loss"]))


def main(arguments: Sequence[str]) -> None:
    """Build, compile and warm up a case, then time steps when asked."""
    from residua.config.plugins import load_plugins

    load_plugins()
    path, backend, warmup, *way = arguments
    config = RunConfig.from_toml(path)
    device = choose_device(config.train.device, "train.device")
    case = Case(Path(path).stem, config, backend, next(iter(way), None))
    with ops.backend(backend), ExitStack() as open_ranks:
        with no_memory() as problem:
            trained = build_case(case, device, open_ranks)
            step = partial(trained, random_batches(config), RATE)
            begin = time.perf_counter()
            step()
            synchronize(device)
            first = time.perf_counter() - begin
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            time_each(step, int(warmup), device)
        if problem:
            _tell({"problem": problem[0]})
            return
        _tell({"first": first})
        for line in sys.stdin:
            _tell(time_each(step, int(line), device))
        totals = trained.totals()
        memory = peak_memory_gib(device) if device.type == "cuda" else None
        _tell({"memory_gib": memory, "loss": totals.loss / totals.steps})


def _tell(what: object) -> None:
    print(ANSWER + json.dumps(what), flush=True)


if __name__ == "__main__":
    with ending():
        main(sys.argv[1:])
