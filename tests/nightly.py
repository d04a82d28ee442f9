"""Divides grids: `make test` runs the cases that can each find a fault of their own, `make nightly` all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.model.pairwise import Row


def only_nightly(cases: Iterable[Any], but: Iterable[Any]) -> list[Any]:
    """All cases, with the mark `nightly` on those that are not in `but`."""
    kept = list(but)
    return [case if case in kept else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def covering(rows: Iterable[Row], *pairs: tuple[str, str]) -> list[Any]:
    """All rows, with the mark `nightly` on those without a choice, or one of these pairs, that earlier rows lack."""
    met: set[Any] = set()
    kept = []
    for row in (rows := list(rows)):
        found = {*row.items(), *((a, b, row[a], row[b]) for a, b in pairs)}
        if found - met:
            kept.append(row)
        met |= found
    return only_nightly(rows, kept)
