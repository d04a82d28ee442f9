"""Faulty lines and files of a corpus: either skipped and counted, or all named in one error."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from residua.reading import ReadError, counted

MAX_LISTED = 10
"""Most problems that an error lists."""
MAX_SEARCHED_BYTES = 1_000_000_000
"""Bytes of text to search for more problems after the first."""


class Problem(NamedTuple):
    """A faulty `unit` (line, row or file) of a `kind`; `what` is the clause that names it, `hint` the way to fix it."""

    unit: str
    kind: str
    what: str
    hint: str
    used: int = 0
    """Documents of a file that were read before the fault; they remain in the text."""


class Problems:
    """The problems in one pass over a corpus: the number of each kind, and the first of each.

    With `skip`, they are skipped. Otherwise `refuse` raises one error for all of them.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.first: dict[tuple[str, str, bool], Problem] = {}
        self.counts: Counter[tuple[str, str, bool]] = Counter()
        self.shown: list[Problem] = []

    @property
    def refusing(self) -> bool:
        """Whether the corpus will be refused, so that reading continues only to find other problems."""
        return bool(self.counts) and not self.skip

    def add(self, problem: Problem) -> None:
        key = problem.unit, problem.kind, problem.used > 0
        self.first.setdefault(key, problem)
        self.counts[key] += 1
        if len(self.shown) < MAX_LISTED:
            self.shown.append(problem)

    def refuse(self, more: bool = False) -> None:
        """Raise a `ReadError` if there are problems that may not be skipped; `more`: the search stopped early."""
        if not self.refusing:
            return
        total = sum(self.counts.values())
        if total == 1:
            raise ReadError(f"{self.shown[0].what}: {self.shown[0].hint}.")
        shown = list(dict.fromkeys([*self.shown, *self.first.values()]))
        by_hint: dict[str, list[str]] = {}
        for problem in shown:
            by_hint.setdefault(problem.hint, []).append(problem.what)
        listed = ". ".join(f"{'; '.join(faults)}: {hint}" for hint, faults in by_hint.items())
        unlisted = f". There are {total - len(shown):,} more: correct them" if total > len(shown) else ""
        alike: Counter[tuple[str, str]] = Counter()
        for (unit, kind, _), count in self.counts.items():
            alike[unit, kind] += count
        kinds = ", ".join(f"{counted(n, unit)} {kind}" for (unit, kind), n in alike.items())
        summary = f"{total:,} problems{' or more' * more} in the text ({kinds})"
        raise ReadError(f"{summary}: {listed}{unlisted}, or skip all of them with --skip-bad.")

    def summary(self) -> list[dict[str, Any]]:
        """List each kind of skipped line or file for dataset.json: its unit, count, and first instance.

        Files whose first documents were used have separate `partial` entries.
        """
        return [
            {"unit": unit, "kind": kind, "count": count, "first": _skipped(self.first[unit, kind, partial])}
            | ({"partial": True} if partial else {})
            for (unit, kind, partial), count in self.counts.items()
        ]


def _skipped(problem: Problem) -> str:
    read = f": read up to document {problem.used:,}, then skipped" if problem.used else ""
    return f"{problem.what}{read}"
