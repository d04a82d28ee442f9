"""What a person sees while a run trains: one live line at a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from residua.config.run import RunConfig
from residua.report.plain import PlainConsole


class Display:
    """Prints the records of a run as they arrive."""

    def __init__(self, config: RunConfig, start: int, console: Console | None = None) -> None:
        self.console = console or PlainConsole(file=sys.stdout)
        self._steps = config.train.steps
        self._tokens_per_step = config.tokens_per_step
        self._experts = ""
        self._live = self._start_line(start) if self.console.is_terminal else None

    def write(self, record: dict[str, Any]) -> None:
        """Show a record of the run."""
        if record["kind"] == "validation":
            self.console.print(validation_line(record))
        elif record["kind"] == "experts":
            self._experts = experts_words(record)
        elif record["kind"] == "train":
            self._show(record)

    def _show(self, record: dict[str, Any]) -> None:
        if self._live is None:
            self.console.print(self._train_line(record), soft_wrap=True)
        else:
            progress, task = self._live
            progress.update(task, completed=record["step"], description=self._train_line(record))

    def close(self) -> None:
        if self._live is not None:
            self._live[0].stop()
            self._live = None

    def _start_line(self, start: int) -> tuple[Progress, TaskID]:
        columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
        progress = Progress(*columns, console=self.console)
        task = progress.add_task("first steps (a GPU run compiles now)", total=self._steps, completed=start)
        progress.start()
        return progress, task

    def _train_line(self, record: dict[str, Any]) -> str:
        left = (self._steps - record["step"]) * self._tokens_per_step / record["tokens_per_second"]
        parts = [
            f"step {record['step']}/{self._steps}",
            f"loss {record['loss']:.4f} (smooth {record['smoothed']:.4f})",
            f"{short(record['tokens_per_second'])} tokens/s",
            f"MFU {record['mfu']:.3f}" if record["mfu"] is not None else "",
            self._experts,
            f"{record['memory_gib']:.1f} GiB",
            f"ETA {duration(left)}",
        ]
        return "  ".join(part for part in parts if part)


def validation_line(record: dict[str, Any]) -> str:
    """A validation record as one line of text."""
    return (
        f"step {record['step']}  validation loss {record['loss']:.4f} nats/token, "
        f"{record['bits_per_byte']:.4f} bits/byte over {short(record['tokens'])} tokens"
    )


def experts_words(record: dict[str, Any]) -> str:
    """How evenly the experts were used: the load of the lightest and the heaviest, 1 being a fair share."""
    return f"experts {record['lightest']:.2f}–{record['heaviest']:.2f}"


def short(number: float) -> str:
    """1234567 → 1.23M."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3723 → 1h02m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
