"""Times training steps of several cases in turns of a few steps; all are compiled in advance and in memory at once.

`python -m residua.bench.turns CONFIG.toml BACKEND WARMUP [WAY]` runs the process of one case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from residua import ops
from residua.bench.step import Case, StepResult, build_case, describe
from residua.config.run import RunConfig
from residua.machine import choose_device, python_command
from residua.report.failure import ending
from residua.train.timing import TimedStep
from residua.train.turns import Turn, open_turn, take_turns


def bench_turns(
    cases: Sequence[Case],
    *,
    rounds: int,
    steps: int,
    warmup: int,
    tell: Callable[[str], object] = lambda text: None,
) -> list[StepResult]:
    """Time `rounds` turns of `steps` steps for each case, on the same random tokens; `tell` receives progress lines."""
    with TemporaryDirectory() as folder, ExitStack() as open_cases:
        turns = [
            open_cases.enter_context(_open(case, Path(folder) / str(number), warmup))
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
        for case, child in zip(cases, turns, strict=True):
            for warning in child.warnings():
                tell(f"{case.name}: {warning}")
        return [_result(*of) for of in zip(cases, turns, firsts, seconds, strict=True)]


def _open(case: Case, place: Path, warmup: int) -> AbstractContextManager[Turn]:
    path = place.with_suffix(".toml")
    path.write_text(case.config.to_toml(), encoding="utf-8")
    way = [] if case.way is None else [case.way]
    command = python_command("-m", "residua.bench.turns", str(path), case.backend, str(warmup), *way)
    return open_turn(case.name, command, place.with_suffix(".log"))


def _result(case: Case, child: Turn, first: dict[str, Any], seconds: list[float]) -> StepResult:
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
        take_turns(partial(build_case, case, device, open_ranks), config, int(warmup))


if __name__ == "__main__":
    with ending():
        main(sys.argv[1:])
