"""Progress bars with an ETA, gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Bars:
    """A progress bar with an ETA for each part of the work."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=28), TextColumn("{task.completed}/{task.total}"),
        )  # fmt: skip
        self._bars = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._bars.stop()

    def track(self, name: str) -> Callable[[int, int], None]:
        bar = self._bars.add_task(name, total=None)
        return lambda done, total: self._bars.update(bar, completed=done, total=total)

    def stages(self) -> Callable[[str, int, int], None]:
        """One bar for work that goes through stages, each named when it begins."""
        bar = self._bars.add_task("opening", total=None)
        return lambda stage, done, total: self._bars.update(bar, description=stage, completed=done, total=total)
