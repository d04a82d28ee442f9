"""A benchmark's results as a table and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from residua.bench.operators import Ceilings, OpResult
from residua.bench.step import StepResult
from residua.config.run import RunConfig
from residua.files import write_atomically, writing
from residua.report.terminal import clock, new_table, open_console, remaining
from residua.train.environment import describe_environment
from residua.train.timing import Sample

WIDTH = 180
"""Columns of a log, enough for the widest table."""
LOG_EVERY = 10.0
"""Seconds between progress lines in a log."""
Tell = Callable[[str, float], object]
"""Receives the name of the current measurement, and the share of the work that is done."""


class BenchProgress:
    """Shows the current measurement and the remaining time on standard error.

    A terminal gets a status line, a log one line every `LOG_EVERY` seconds. `parts` is the number of calls of
    `finish_part` to expect; without it, no time is shown.
    """

    keeps_log = True

    def __init__(self, parts: int | None = None, console: Console | None = None) -> None:
        self._parts, self._finished = parts, 0
        self._start: float | None = None
        self._logged: float | None = None
        self._console = console or open_console(None, stderr=True)
        self._status = self._console.status("measuring this device")

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._status.stop()

    def tell(self, what: str, share: float = 0.0) -> None:
        """Show the current measurement; `share` of the current part is done."""
        now = time.monotonic()
        self._start = now if self._start is None else self._start
        line = what if self._parts is None else f"{what} ({self._place(share)})"
        self._status.update(line)
        if self.keeps_log and (self._logged is None or now - self._logged >= LOG_EVERY):
            self._log(line)
            self._logged = now

    def finish_part(self) -> None:
        self._finished += 1

    def _log(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True, markup=False)

    def _place(self, share: float = 0.0) -> str:
        place, done, parts = f"{self._finished} of {self._parts}", self._finished + share, self._parts or 0
        if self._start is None or not 0 < done < parts:
            return place
        return f"{place}, {clock(remaining(self._start, 0, done, parts))} left"


class Bench:
    """A benchmark of a device: its software versions, the console for output, and the file `out` for all numbers."""

    def __init__(self, device: torch.device, out: Path | None) -> None:
        self.device, self.out = device, out
        self.environment, self.console = describe_environment(device), open_console(WIDTH)

    def print_device(self, ceilings: Ceilings | None = None) -> None:
        """Print the device, the versions and, if measured, the ceilings."""
        about = self.environment
        versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "triton", "python") if about[name])
        self.console.print(f"{about.get('gpu') or about['processor'] or about['platform']}: {versions}")
        if ceilings is not None:
            self.console.print(
                f"measured in this run: copy {ceilings.copy_bytes_per_second / 1e12:.3g} TB/s, "
                f"{ceilings.dtype} matrix product {ceilings.matmul_flops_per_second / 1e12:.4g} TFLOP/s"
            )

    def save(self, kind: str, **content: Any) -> None:
        """Write all results as plain JSON: seconds, bytes, FLOP/s."""
        save_report(self.console, self.out, {"kind": kind, "environment": self.environment, **content})


def describe_step(config: RunConfig) -> str:
    """One step of a configuration, in words."""
    recipe = config.train
    return (
        f"one step: {recipe.accumulate} micro-batch(es) of {recipe.micro_batch} × {config.sequence} random tokens, "
        f"optimizer {recipe.optimizer.kind}, precision {recipe.precision}, compile {recipe.compile}"
    )


def print_steps(console: Console, results: Sequence[StepResult]) -> None:
    """Print one row per case, with ratios to the first."""
    measured = ("step ms", "p10–p90", "time ×", "tokens/s", "MFU", "GiB", "memory ×", "first step")
    table = new_table(("case",), ("parameters", *measured))
    for result in results:
        table.add_row(result.name, f"{result.parameters / 1e6:.2f}M", *_cells(result, results[0]))
    console.print(table)


def _cells(result: StepResult, first: StepResult) -> list[str]:
    if result.problem is not None:
        return [result.problem]
    assert result.step is not None
    time, memory = ratios(result, first)
    return [
        number(result.step.median * 1e3, ".2f"),
        spread(result.step),
        number(time, ".3f"),
        number(result.tokens_per_second, ",.0f"),
        number(result.mfu, ".3f"),
        number(result.peak_memory_gib, ".2f"),
        number(memory, ".3f"),
        f"{result.first_step:.1f} s",
    ]


def ratios(result: StepResult, first: StepResult) -> tuple[float | None, float | None]:
    """Time and memory relative to the first case, where both were measured."""
    time = None if result.step is None or first.step is None else result.step.median / first.step.median
    ours, theirs = result.peak_memory_gib, first.peak_memory_gib
    return time, None if ours is None or theirs is None else ours / theirs


def step_rows(results: Sequence[StepResult]) -> list[dict[str, Any]]:
    """The results for the report file, with ratios to the first."""
    both = [(result, *ratios(result, results[0])) for result in results]
    return [{**asdict(result), "time_ratio": time, "memory_ratio": memory} for result, time, memory in both]


def print_operators(console: Console, results: Sequence[OpResult]) -> None:
    """Print one row per implementation of each case."""
    measured = ("p10–p90", "MiB", "share")
    table = new_table(("case", "implementation"), ("forward ms", *measured, "both ms", *measured, "GiB"))
    for result in results:
        table.add_row(result.case, result.implementation, *_operator_cells(result))
    console.print(table)
    for result in results:
        if result.problem is not None:
            console.print(f"{result.case}, {result.implementation}: {result.problem}", soft_wrap=True, markup=False)
    console.print(
        "both: forward and backward. MiB: the minimum traffic, reading every input of a junction once and "
        "writing every output once (kernels that evaluate several reads together may move less). share: MiB "
        "per second as a share of the copy bandwidth; for cross-entropies, FLOP/s as a share of the "
        "matrix product's. GiB: memory of both passes, in addition to the inputs.",
        soft_wrap=True,
    )


def _operator_cells(result: OpResult) -> list[str]:
    if result.problem is not None:
        return ["not timed"]
    forward = (result.forward, result.forward_bytes, result.forward_share)
    cells = []
    for sample, moved, share in (forward, (result.both, result.both_bytes, result.both_share)):
        assert sample is not None
        cells += [number(sample.median * 1e3, ".3f"), spread(sample, 3), f"{moved / 2**20:,.0f}", number(share, ".0%")]
    return [*cells, number(result.memory_gib, ".2f")]


def operator_line(result: OpResult) -> str:
    """One result as a line for a log."""
    title = f"{result.case}: {result.implementation}"
    if result.forward is None or result.both is None:
        return f"{title} not timed, {result.problem}"
    return f"{title} {result.forward.median * 1e3:.3g} ms forward, {result.both.median * 1e3:.3g} ms both"


def can_be_replaced(path: Path) -> bool:
    """Whether a second write replaces the first. A pipe or a device would emit both reports."""
    return path.is_file() or not path.exists()


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report, creating its folder. Files are written atomically; a pipe or a device just receives the text."""
    text = json.dumps(report, indent=1) + "\n"
    if can_be_replaced(path):
        write_atomically(path.resolve(), text, parents=True)
    else:
        with writing(path):
            path.write_text(text, encoding="utf-8")


def save_report(console: Console, out: Path | None, report: dict[str, Any]) -> None:
    """Write a report to `out`, if given, and print where it is."""
    if out is not None:
        write_json(out, report)
        console.print(f"written to {out}", soft_wrap=True)


def number(value: float | None, form: str) -> str:
    """A table cell; a dash if there is no measurement."""
    return "–" if value is None else format(value, form)


def spread(sample: Sample, digits: int = 2) -> str:
    """p10–p90 in milliseconds."""
    return f"{sample.p10 * 1e3:.{digits}f}–{sample.p90 * 1e3:.{digits}f}"
