"""The findings of checks: one row each, for a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from residua.reading import brief

if TYPE_CHECKING:
    from rich.console import Console

State = Literal["ok", "missing", "note", "failed"]
MARKS: dict[State, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "missing": ("–", "dim"),
    "note": ("!", "yellow"),
    "failed": ("✗", "red"),
}


@dataclass(frozen=True)
class Finding:
    """One row. `missing` is an optional part, `note` a fact; only `failed` is a fault. `fix` is the remedy."""

    group: str
    name: str
    state: State
    words: str
    fix: str = ""


Check = Callable[[], Iterable[Finding]]


def run_checks(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield the findings of named checks as they run. A check that raises becomes a failed row, not a traceback."""
    for name, check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Finding("doctor", name, "failed", in_words(error), fix_of(error))


def in_words(error: BaseException) -> str:
    """Any library's error in one line."""
    message = " ".join(str(error).split())
    return brief(f"{type(error).__name__}: {message}" if message else type(error).__name__, 160)


def fix_of(error: BaseException) -> str:
    """The remedy for an error, if one is known."""
    message = str(error)
    if "Python.h" in message:
        return "apt-get install python3-dev"
    if "C compiler" in message or "'gcc'" in message or "cc1" in message:
        return "apt-get install gcc"
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the output of other libraries during import and compilation."""
    import io
    import logging
    import warnings
    from contextlib import redirect_stderr, redirect_stdout

    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def print_finding(console: Console, finding: Finding, before: Finding | None) -> None:
    """Print one row, under its group's title if the group is new."""
    from rich.text import Text

    if before is None or before.group != finding.group:
        console.print(Text(f"\n{finding.group}" if before else finding.group, "bold"))
    mark, colour = MARKS[finding.state]
    console.print(Text.assemble(("  "), (mark, colour), f" {finding.name:<24} ", finding.words), soft_wrap=True)
    if finding.fix:
        console.print(Text.assemble(" " * 29, ("→ ", "dim"), (finding.fix, "bold")), soft_wrap=True)


def closing(findings: Sequence[Finding]) -> str:
    """The closing sentence."""
    failed = [finding.name for finding in findings if finding.state == "failed"]
    if failed:
        return f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}."
    return f"All {len(findings)} checks passed."


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """`{"passed": …, "findings": […]}`."""
    return {"passed": passed(findings), "findings": [asdict(finding) for finding in findings]}


def passed(findings: Sequence[Finding]) -> bool:
    """Whether nothing failed."""
    return all(finding.state != "failed" for finding in findings)
