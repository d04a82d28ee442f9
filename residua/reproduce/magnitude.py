"""Whether an effect is as large as the paper's: judged apart from its direction, within a stated band."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from residua.study.statistics import Estimate

BAND = 0.25
"""A magnitude agrees if ours is within this share of the paper's effect, also where our interval is narrower.

Of a ratio both its logarithm and the ratio itself must be: 3 % for 5 % of overhead is not, and 10× for 15× is not.
"""
Magnitude = Literal["agrees", "larger", "smaller", "opposite", "not shown"]
INSIDE = "inside our interval"


@dataclass(frozen=True)
class PaperNumber:
    """The paper's number for a claim: a ratio or a difference, in a format; with `or_more` a lower bound."""

    value: float
    ratio: bool
    digits: str = "g"
    or_more: bool = False

    def compare(self, found: Estimate | None) -> tuple[Magnitude, str]:
        """The verdict on our magnitude, and the paper's number in words with its place relative to our interval."""
        shown = ("more than " if self.or_more else "") + f"{self.value:{self.digits}}" + ("×" if self.ratio else "")
        if found is None:
            return "not shown", shown
        magnitude, place = self._magnitude(found), _place(self.value, found)
        near = magnitude == "agrees" and place != INSIDE and not self.or_more
        return magnitude, f"{shown}, {place}" + (f", but within {BAND:.0%}" if near else "")

    def _magnitude(self, found: Estimate) -> Magnitude:
        """Effects are differences, or logarithms of ratios: 0 is none.

        Ours agrees if the paper's number lies inside our interval, or our number within `BAND` of the paper's effect.
        It is not shown without an interval, or if the interval holds both the paper's number and no effect.
        """
        if found.low is None and found.high is None:
            return "not shown"
        effect: Callable[[float], float] = math.log if self.ratio else float
        low = -math.inf if found.low is None else effect(found.low)
        high = math.inf if found.high is None else effect(found.high)
        paper, ours = effect(self.value), effect(found.value)
        inside = low <= paper <= high
        band = min(BAND * abs(paper), math.log(1 + BAND)) if self.ratio else BAND * abs(paper)
        if low <= 0 <= high:
            return "not shown" if inside else "smaller"
        if inside or abs(ours - paper) <= band:
            return "agrees"
        if ours * paper < 0:
            return "opposite"
        if abs(ours) < abs(paper):
            return "smaller"
        return "agrees" if self.or_more else "larger"


def _place(value: float, found: Estimate) -> str:
    if found.low is None and found.high is None:
        return "with one seed there is no interval to compare it with"
    if found.low is not None and value < found.low:
        return "below our interval"
    return "above our interval" if found.high is not None and value > found.high else INSIDE
