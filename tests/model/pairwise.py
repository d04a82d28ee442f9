"""Covering arrays: few rows in which every two choices of different factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = frozenset[tuple[str, str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def possible_pairs(factors: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> set[Pair]:
    """Every two choices of different factors that may stand together."""
    return {
        frozenset(((f, a), (g, b)))
        for f, g in combinations(factors, 2)
        for a in factors[f]
        for b in factors[g]
        if fits({f: a, g: b})
    }


def covering_array(factors: Mapping[str, Sequence[str]], fits: Callable[[Row], bool]) -> list[Row]:
    """Rows that cover every possible pair, greedily and always in the same order.

    Each row starts from the first pair not yet covered and takes, factor by factor, the choice that covers most of
    what is left. `fits` judges partial rows; a row it admits must be completable.
    """
    order = [frozenset(p) for p in sorted(sorted(p) for p in possible_pairs(factors, fits))]
    left = dict.fromkeys(order)
    rows = []
    while left:
        row: Row = dict(sorted(next(iter(left))))
        for factor in factors:
            if factor not in row:
                row[factor] = _best(factor, factors[factor], row, left, fits)
        for pair in pairs_of(row):
            left.pop(pair, None)
        rows.append({factor: row[factor] for factor in factors})
    return rows


def _best(factor: str, choices: Sequence[str], row: Row, left: Mapping[Pair, None], fits: Callable[[Row], bool]) -> str:
    allowed = [c for c in choices if fits({**row, factor: c})]

    def gain(choice: str) -> int:
        return sum(frozenset(((factor, choice), other)) in left for other in row.items())

    return max(allowed, key=gain)
