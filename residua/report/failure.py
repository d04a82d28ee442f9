"""End a command that cannot continue: a user's mistake in one sentence, any other error with its traceback.

One sentence is enough for a `UserError`, a full disk, missing permissions, or running out of memory. Everything else is
a bug, ours or a plugin's: its traceback follows a line that names the plugin's file and line, if one is involved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from pydantic import ValidationError

from residua.config.plugins import causes, plugin_place
from residua.errors import TRACEBACK, UserError
from residua.files import is_disk_failure
from residua.machine import out_of_memory
from residua.reading import brief
from residua.report import terminal
from residua.report.plain import one_line, outcome

if TYPE_CHECKING:
    from rich.console import Console

SPOKEN = "residua: "
"""The prefix of our own lines on standard error."""


class Failure(NamedTuple):
    """An error to print: one line, then a traceback if it needs one."""

    sentence: str
    trace: str = ""
    bug: bool = False

    def __str__(self) -> str:
        return f"{SPOKEN}{one_line(self.sentence)}\n{self.trace}"


def describe(error: BaseException, *, expected: bool = False) -> Failure:
    """Prepare an error for printing; an `expected` error is explained by its own message."""
    bug = not expected and not is_expected(error)
    wanted = bug or os.environ.get(TRACEBACK, "0") not in ("", "0")
    return Failure(_sentence(error, bug), _trace(error) if wanted else "", bug)


def is_expected(error: BaseException) -> bool:
    """Whether one sentence explains an error: a user's mistake, a full disk, or running out of memory."""
    if out_of_memory(error):
        return True
    place = plugin_place(error)
    if isinstance(error, UserError):
        # a plugin's own tables refuse the value of a key by a `ValueError`
        refused = any(isinstance(link, ValidationError) for link in causes(error))
        return place is None or isinstance(place.error, UserError) or refused
    return place is None and isinstance(error, OSError) and is_disk_failure(error)


def sentence(error: BaseException) -> str:
    """An error in one line, which names the plugin's line if there is one."""
    return _sentence(error, bug=not is_expected(error))


def show(failure: Failure) -> None:
    """Print a failure on standard error, ignoring errors such as a full disk."""
    with suppress(OSError):
        print(failure, end="", file=sys.stderr, flush=True)


def tell(console: Console, what: str, error: Exception) -> None:
    """Print that a part of the work failed and why; the rest continues."""
    failure = describe(error)
    console.print(outcome(f"{what}: {failure.sentence}", good=False))
    if failure.trace:
        console.print(failure.trace, markup=False, highlight=False, soft_wrap=True)


def last_words(log: str) -> str:
    """Why a process ended: the last log line with our prefix, which may precede a traceback, or else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line.removeprefix(SPOKEN) for line in lines if line.startswith(SPOKEN)]
    return (ours or lines or [""])[-1]


@contextmanager
def ending() -> Iterator[None]:
    """If the block fails, end the process with a sentence or a traceback: for commands outside the `residua` CLI."""
    try:
        yield
    except Exception as error:
        show(describe(error))
        sys.exit(1)


def _sentence(error: BaseException, bug: bool) -> str:
    place = plugin_place(error)
    if not bug:
        complete = place is None or (place.raised and isinstance(place.error, UserError)) or bool(out_of_memory(error))
        return terminal.say(error) if complete else f"{terminal.say(error).rstrip('.')} (the plugin's line: {place})."
    first = error if place is None else place.error
    words = brief(f"{type(first).__name__}: {first}".removesuffix(": "))
    if place is not None:
        return f"the plugin {place}: {words}"
    return f"an unexpected error in Residua, {words}: please report it with its traceback"


def _trace(error: BaseException) -> str:
    for link in causes(error):
        link.__suppress_context__ = False  # `from None` hides a cause that the user need not see
    return "".join(format_exception(error.with_traceback(_without_command_line(error.__traceback__))))


def _without_command_line(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback below the argument-parsing library."""
    trimmed = trace
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in ("typer", "click"):
            trimmed = trace.tb_next
        trace = trace.tb_next
    return trimmed
