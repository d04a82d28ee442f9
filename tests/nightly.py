"""Divides grids: `make test` runs the cases that can each find a different fault, `make nightly` all of them."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.model.pairwise import Row


def only_nightly(cases: Iterable[Any], but: Iterable[Any]) -> list[Any]:
    """All cases, with the mark `nightly` on those that are not in `but`."""
    kept = list(but)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def covering(rows: Iterable[Row], *pairs: tuple[str, str]) -> list[Any]:
    """All rows, with the mark `nightly` on those that are not needed to meet every choice and each of these pairs.

    Rows are kept greedily by the number of pairs that no earlier row has.
    """
    meets = [(row, {*row.items(), *((a, b, row[a], row[b]) for a, b in pairs)}) for row in rows]
    left, kept = set().union(*(met for _, met in meets)), []
    while left:
        best, met = max(meets, key=lambda entry: len(entry[1] & left))
        kept.append(best)
        left -= met
    return only_nightly([row for row, _ in meets], kept)
