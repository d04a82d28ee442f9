"""Faulty lines and files of a corpus: skipped and counted, or all of them in one refusal."""

from __future__ import annotations

from typing import Any, NamedTuple

from residua.reading import ReadError, counted

SHOWN = 10
"""Problems that a refusal spells out."""
SEARCHED_BYTES = 1_000_000_000
"""Bytes of text that are searched for more problems after the first."""


class Problem(NamedTuple):
    """A faulty `unit` (line, row or file) of a `kind`; `what` is the clause that names it, `hint` says how to go on."""

    unit: str
    kind: str
    what: str
    hint: str


class Problems:
    """The problems of one reading of a corpus: how many of each kind, and the first of each.

    `skip` leaves them out. Otherwise `refuse` raises one error for all of them.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.first: dict[tuple[str, str], Problem] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.shown: list[Problem] = []

    @property
    def refusing(self) -> bool:
        """Whether the corpus will be refused: reading goes on only to find the other problems."""
        return bool(self.counts) and not self.skip

    def add(self, problem: Problem) -> None:
        """Count a problem."""
        key = problem.unit, problem.kind
        self.first.setdefault(key, problem)
        self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.shown) < SHOWN:
            self.shown.append(problem)

    def refuse(self, more: bool = False) -> None:
        """Raise a `ReadError` if there are problems that may not be skipped; `more`: the search for others ended."""
        if not self.refusing:
            return
        total = sum(self.counts.values())
        if total == 1:
            raise ReadError(f"{self.shown[0].what}: {self.shown[0].hint}.")
        listed = "; ".join(problem.what for problem in self.shown)
        unlisted = f"; and {total - len(self.shown):,} more" if total > len(self.shown) else ""
        kinds = ", ".join(f"{counted(n, unit)} {kind}" for (unit, kind), n in self.counts.items())
        hints = " or ".join(dict.fromkeys(problem.hint for problem in self.first.values()))
        found = f"{total:,} problems{' or more' * more} in the text ({kinds})"
        raise ReadError(f"{found}: {listed}{unlisted}: {hints}, or leave all of them out with --skip-bad.")

    def summary(self) -> list[dict[str, Any]]:
        """Each kind of skipped line or file for dataset.json: its unit, its count, and the first."""
        return [
            {"unit": unit, "kind": kind, "count": count, "first": self.first[unit, kind].what}
            for (unit, kind), count in self.counts.items()
        ]
