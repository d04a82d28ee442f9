"""How a run without a result has crashed, if it has: by the record of its last session and the end of its log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from residua.machine import has_ended
from residua.report.plain import printable

LOGS = "logs"
"""The folder of a study that holds what each of its trainers prints."""
LOG_BYTES = 4096
"""The end of a log that is read."""


def how_it_crashed(session: Mapping[str, Any], log: Sequence[str]) -> str:
    """The last line of a log, else the words of the error; empty if the run goes on, as far as these tell.

    A `session` of environment.json names its process, and the error that ended it if Python could still write it. A
    run of a study may fail before its session begins: then only its log has the reason.
    """
    last = log[-1] if log else ""
    if last.startswith("residua: ") and "stopped by a signal" not in last:
        return last
    failed, process = session.get("failed"), session.get("process")
    if isinstance(failed, str):
        return last or failed or "it left no reason"
    if isinstance(process, str):
        return f"its process has ended: {last or 'it left no reason'}" if has_ended(process) else ""
    return last if any(line.startswith("Traceback ") for line in log) else ""


def read_tail(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    # a pipe in its place must not make the page wait
    descriptor = os.open(log, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - LOG_BYTES))
        lines = file.read(LOG_BYTES).decode("utf-8", "replace").splitlines()
    return [printable(line)[:300] for line in lines if line.strip()]
