"""The output of commands: a console, tables, progress bars with an ETA, durations, and errors as sentences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from residua.files import sentence
from residua.machine import out_of_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Progress = Callable[[int, int], None]
"""Called with the number of items done and the total."""
StageProgress = Callable[[str, int, int], None]
"""Called with the name of the current stage, and the number of its items done and in total."""

LOG_WIDTH = 120


def open_console(log_width: int | None = LOG_WIDTH, *, stderr: bool = False) -> Console:
    """Open standard output or error. In a file or pipe, lines are `log_width` wide, so that whole tables fit."""
    from residua.report.plain import PlainConsole

    console = PlainConsole(stderr=stderr)
    return console if console.is_terminal else PlainConsole(stderr=stderr, width=log_width)


def new_table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of names on the left, then right-aligned columns of numbers.

    If it does not fit the terminal, its cells wrap.
    """
    from rich import box

    from residua.report.tables import FittingTable

    table = FittingTable(header_style="bold", box=box.SIMPLE_HEAD)
    for title in names:
        table.add_column(title, no_wrap=True)
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


class ProgressBars:
    """A progress bar with an ETA for each part of the work. The bars disappear when the block ends."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=28),
            TextColumn("{task.completed}/{task.total}"),
        )  # fmt: skip
        bars = (*columns, TimeRemainingColumn())
        # in a file or a pipe, a removed bar would leave an empty line
        self._bars = Progress(*bars, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._bars.stop()

    def track(self, name: str) -> Progress:
        bar = self._bars.add_task(name, total=None)
        return lambda done, total: self._bars.update(bar, completed=done, total=total)

    def stages(self, first: str = "opening") -> StageProgress:
        """One bar for work in stages, labelled with the current stage."""
        bar = self._bars.add_task(first, total=None)
        return lambda stage, done, total: self._bars.update(bar, description=stage, completed=done, total=total)


def remaining(start: float, before: int, done: float, total: int) -> float | None:
    """Seconds left at the rate since `start` (a `time.monotonic` value); None until an item is done.

    `before` items were done earlier and do not count towards the rate.
    """
    if done <= before:
        return None
    return (time.monotonic() - start) / (done - before) * (total - done)


def clock(seconds: float | None) -> str:
    """Seconds as 1:02:03 or 2:03; "?" when unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(mistake: BaseException) -> str:
    """An error as a sentence for users, without error numbers or class names."""
    if isinstance(mistake, OSError):
        return sentence(mistake)
    if where := out_of_memory(mistake):
        return f"{where} ran out of memory: end other programs, or choose a smaller model or batch."
    return str(mistake)
