"""Two verdicts on every claim of a table, on its direction and its magnitude, with the interval behind them.

Claims concern differences and ratios between rows, since another text and size give other absolute losses. The
direction is confirmed if the whole interval lies on the claim's side, contradicted if the whole interval lies on the
other side, and otherwise not shown. The magnitude is judged if the paper has a number (`PaperNumber`). With one seed
there is no interval and nothing is shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from residua.reproduce.entry import Below, Diverges, Falls, Gain, Order, Study, Unmeasured
from residua.reproduce.measures import MEASURES, Measure
from residua.study.results import RunResult, StudyResult
from residua.study.statistics import Interval, estimate_ratio, paired_difference

DIVERGED = re.compile(r"the run diverged|the (loss|gradient norm) is (nan|-?inf)")
"""The trainer's message about a run that it stopped (`train/health.py`)."""
ALL = "all"
BAND = 0.25
"""A magnitude agrees if ours is within this share of the paper's effect, even if our interval is narrower.

For a ratio, both its logarithm and the ratio itself must be: neither 3 % overhead for 5 % nor 10× for 15× agrees.
"""
Magnitude = Literal["agrees", "larger", "smaller", "opposite", "not shown"]
INSIDE = "inside our interval"
Direction = Literal["confirmed", "contradicted", "not shown"]
THAN_THE_PAPERS = {"larger": "larger than the paper's", "smaller": "smaller than the paper's"}


@dataclass(frozen=True)
class PaperNumber:
    """The paper's number for a claim: a ratio or a difference, with its format; with `or_more`, a lower bound."""

    value: float
    ratio: bool
    digits: str = "g"
    or_more: bool = False

    def compare(self, ours: Interval | None) -> tuple[Magnitude, str]:
        """The verdict on our magnitude, and the paper's number in words with its position relative to our interval."""
        shown = ("more than " if self.or_more else "") + f"{self.value:{self.digits}}" + ("×" if self.ratio else "")
        if ours is None:
            return "not shown", shown
        magnitude, place = self._magnitude(ours), _place(self.value, ours)
        near = magnitude == "agrees" and place != INSIDE and not self.or_more
        return magnitude, f"{shown}, {place}" + (f", but within {BAND:.0%}" if near else "")

    def _magnitude(self, estimate: Interval) -> Magnitude:
        """Effects are differences, or logarithms of ratios: 0 means no effect.

        Ours agrees if the paper's number lies inside our interval, or our number within `BAND` of the paper's effect.
        It is not shown without an interval, or if the interval contains both the paper's number and no effect.
        """
        if estimate.ends is None:
            return "not shown"
        effect: Callable[[float], float] = math.log if self.ratio else float
        paper, ours = effect(self.value), effect(estimate.value)
        band = min(BAND * abs(paper), math.log(1 + BAND)) if self.ratio else BAND * abs(paper)
        if estimate.holds(1.0 if self.ratio else 0.0):
            return "not shown" if estimate.holds(self.value) else "smaller"
        if estimate.holds(self.value) or abs(ours - paper) <= band:
            return "agrees"
        if ours * paper < 0:
            return "opposite"
        if abs(ours) < abs(paper):
            return "smaller"
        return "agrees" if self.or_more else "larger"


def _place(value: float, estimate: Interval) -> str:
    if estimate.ends is None:
        return "with one seed there is no interval for comparison"
    return "below our interval" if estimate.above(value) else "above our interval" if estimate.below(value) else INSIDE


@dataclass(frozen=True)
class Verdict:
    """Our runs' verdict on a claim at one size. `found` has our number and its interval, `printed` the paper's number.

    `magnitude` is None if the paper has no number.
    """

    claim: str
    size: str
    direction: Direction
    magnitude: Magnitude | None
    found: str
    printed: str = ""

    @property
    def sentence(self) -> str:
        word = f"direction {self.direction}"
        if self.magnitude is not None:
            word += f", magnitude {THAN_THE_PAPERS.get(self.magnitude, self.magnitude)}"
        paper = f" The paper reports {self.printed}." if self.printed else ""
        return f"{self.claim} ({self.size}): {word}. {self.found}.{paper}"


@dataclass(frozen=True)
class Measured:
    """A study's results in its folder, and the entry they are compared with.

    `absent` says why the study lacks certain rows.
    """

    entry: Study
    result: StudyResult
    out: Path
    absent: Mapping[str, str] = field(default_factory=dict)

    def runs(self, size: str, row: str) -> list[RunResult]:
        """The runs of a row that train for the full budget."""
        wanted = (size, row, 1.0)
        return [run for run in self.result.runs if (self.size_of(run.size), run.variant, run.budget) == wanted]

    def values(self, size: str, row: str, measure: Measure) -> dict[int, float]:
        """The values of a measure for the complete runs of a row, by seed."""
        done = (run for run in self.runs(size, row) if run.status == "complete")
        return {run.seed: value for run in done if (value := measure.of(run, self.out)) is not None}

    def measure(self, name: str) -> Measure:
        """A measure, or its substitute if some rows lack it, so that all rows of a table use one definition."""
        measure = MEASURES[name]
        other = MEASURES.get(measure.instead)
        return other if other and not self._everywhere(measure) and self._everywhere(other) else measure

    def _everywhere(self, measure: Measure) -> bool:
        """Whether every complete run of the rows has this measure."""
        done = [run for run in self.result.runs if run.status == "complete" and run.budget == 1.0]
        return all(measure.of(run, self.out) is not None for run in done)

    def why_not(self, *rows: str) -> str:
        """Which of these rows are absent, and why; empty if none are."""
        return by_reason({row: self.absent[row] for row in rows if row in self.absent})

    def published(self, size: str, row: str, column: str) -> float | None:
        rows = {known.name: known for known in self.entry.rows}
        return rows[row].published.get(size, {}).get(column)

    def size_of(self, known: str) -> str:
        """The entry's name for a size that the study knows by its file or, if it is the only one, by its preset."""
        return self.entry.sizes[0].name if len(self.entry.sizes) == 1 else Path(known).stem


def by_reason(absent: Mapping[str, str]) -> str:
    """Absent rows, grouped by reason: `mgr8, block4: not in this study`."""
    reasons = dict.fromkeys(absent.values())
    return "; ".join(f"{', '.join(row for row in absent if absent[row] == why)}: {why}" for why in reasons)


def verdicts(measured: Measured) -> list[Verdict]:
    """Judge every claim at every size it is about."""
    judge: dict[type, Callable[..., Verdict]] = {
        Below: _below, Order: _order, Gain: _gain, Falls: _falls, Diverges: _diverges, Unmeasured: _unmeasured,
    }  # fmt: skip
    sizes = [size.name for size in measured.entry.sizes]
    return [
        judge[type(claim)](claim, size, measured)
        for claim in measured.entry.claims
        for size in ([ALL] if claim.over_sizes else sizes)
        if size == ALL or not claim.sizes or size in claim.sizes
    ]


def _unmeasured(claim: Unmeasured, size: str, measured: Measured) -> Verdict:
    if claim.published is None:
        return Verdict(claim.text, size, "not shown", None, claim.reason)
    return Verdict(claim.text, size, "not shown", "not shown", claim.reason, f"{claim.published:g}×")


def _below(claim: Below, size: str, measured: Measured) -> Verdict:
    """If more is better, the claim is about the other row's gain, and is shown with a plus."""
    measure = measured.measure(claim.measure)
    row, than = (claim.than, claim.row) if measure.more_is_better else (claim.row, claim.than)
    estimate = _compared(row, than, size, measure, measured)
    paper = _paper_number(claim, row, than, size, measured)
    magnitude, printed = paper.compare(estimate) if paper else (None, "")
    return Verdict(
        claim.text,
        size,
        _side(estimate, _neutral(measure), upward=measure.more_is_better),
        magnitude,
        measured.why_not(claim.row, claim.than) or _in_words(estimate, measure, f"{row} against {than}"),
        printed,
    )


def _order(claim: Order, size: str, measured: Measured) -> Verdict:
    """Absent rows leave an order undecided, unless the others contradict it."""
    measure, absent = measured.measure(claim.measure), measured.why_not(*claim.rows)
    rows = [row for row in claim.rows if row not in measured.absent]
    pairs = [(low, high, _compared(low, high, size, measure, measured)) for low, high in pairwise(rows)]
    words = {(low, high): _side(estimate, _neutral(measure)) for low, high, estimate in pairs}
    wrong = [pair for pair, word in words.items() if word == "contradicted"]
    open_ = [pair for pair, word in words.items() if word == "not shown"]
    word: Direction = "contradicted" if wrong else "not shown" if open_ or absent else "confirmed"
    sentences = [_in_words(estimate, measure, f"{low} against {high}") for low, high, estimate in pairs]
    sentences += [absent] if absent else []
    return Verdict(claim.text, size, word, None, "; ".join(sentences), " < ".join(claim.rows))


def _gain(claim: Gain, size: str, measured: Measured) -> Verdict:
    result = measured.result
    if claim.measure == "compute_advantage":
        estimate = next((row.advantage for row in result.scaling if row.name == claim.row), None)
    else:
        rows = [row for row in result.variants if (measured.size_of(row.size), row.name) == (size, claim.row)]
        estimate = getattr(rows[0], claim.measure) if rows else None
    word = _side(estimate, 1.0, upward=claim.published > 1.0)
    title = {
        "step_gain": "tokens for the same loss, baseline / ours",
        "equivalent_tokens": "equivalent tokens",
        "compute_advantage": "compute for the same loss, baseline / ours",
        "throughput_ratio": "tokens per second, ours / baseline",
    }[claim.measure]
    magnitude, printed = PaperNumber(claim.published, ratio=True).compare(estimate)
    if estimate is None:
        sentence = measured.why_not(claim.row) or f"{title}: not measured"
    else:
        sentence = f"{title}: {_ratio_text(estimate)}"
    return Verdict(claim.text, size, word, magnitude, sentence, printed)


def _falls(claim: Falls, size: str, measured: Measured) -> Verdict:
    measure = MEASURES[claim.measure]
    values = list(measured.values(size, claim.row, measure).values())
    estimate = estimate_ratio(values, measured.result.confidence) if values else None
    sentence = measured.why_not(claim.row) or _in_words(estimate, measure, claim.row)
    return Verdict(claim.text, size, _side(estimate, 1.0, upward=claim.rises), None, sentence)


def _diverges(claim: Diverges, size: str, measured: Measured) -> Verdict:
    runs = measured.runs(size, claim.row)
    diverged = [run for run in runs if DIVERGED.search(run.problem)]
    done = [run for run in runs if run.status == "complete"]
    planned = max(len(runs), len(measured.result.seeds))  # a results file contains only complete runs
    word: Direction = "not shown" if len(done) != planned else "contradicted"
    word = "confirmed" if len(diverged) == planned else word
    sentence = measured.why_not(claim.row) or f"{len(diverged)} of {planned} runs diverged, {len(done)} completed"
    return Verdict(claim.text, size, word, None, sentence)


def _compared(row: str, than: str, size: str, measure: Measure, measured: Measured) -> Interval | None:
    """row − than by seed, or row / than for measures that are compared by ratio."""
    ours, theirs = (measured.values(size, name, measure) for name in (row, than))
    level = measured.result.confidence
    if not measure.ratio:
        return paired_difference(ours, theirs, level)
    shared = sorted(ours.keys() & theirs.keys())
    ratios = [ours[seed] / theirs[seed] for seed in shared if ours[seed] > 0 and theirs[seed] > 0]
    return estimate_ratio(ratios, level) if ratios else None


def _neutral(measure: Measure) -> float:
    return 1.0 if measure.ratio else 0.0


def _side(estimate: Interval | None, neutral: float, upward: bool = False) -> Direction:
    """Whether an interval lies entirely on the claimed side of `neutral`: below it, or above it with `upward`."""
    if estimate is None:
        return "not shown"
    below, above = estimate.below(neutral), estimate.above(neutral)
    if above if upward else below:
        return "confirmed"
    return "contradicted" if (below if upward else above) else "not shown"


def _paper_number(claim: Below, row: str, than: str, size: str, measured: Measured) -> PaperNumber | None:
    """The number stated by the claim, else the difference or ratio of the values in the paper's table."""
    measure = MEASURES[claim.measure]
    digits = measure.times if measure.ratio else "+.4f"
    if claim.published is not None:
        return PaperNumber(claim.published, measure.ratio, "g" if measure.ratio else "+g", claim.or_more)
    ours, theirs = (measured.published(size, name, claim.measure) for name in (row, than))
    if ours is None or theirs is None:
        return None
    return PaperNumber(ours / theirs if measure.ratio else ours - theirs, measure.ratio, digits)


def _in_words(estimate: Interval | None, measure: Measure, what: str) -> str:
    if estimate is None:
        return f"{what}: {measure.title} not measured"
    if measure.ratio:
        return f"{what}: {measure.title} {_ratio_text(estimate, measure.times)}"
    if estimate.low is None:
        return f"{what}: {measure.title} {estimate.value:+.4f} (n = 1, no interval)"
    return f"{what}: {measure.title} {estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


def _ratio_text(estimate: Interval, digits: str = ".2f") -> str:
    if estimate.ends is None:
        return f"{estimate.value:{digits}}× (n = {estimate.count}, no interval)"
    low, high = ("…" if end is None else f"{end:{digits}}" for end in (estimate.low, estimate.high))
    return f"{estimate.value:{digits}}× [{low}, {high}]"
