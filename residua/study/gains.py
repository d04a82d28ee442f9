"""The gain of a variant over the baseline: per step on one schedule's curve, in equivalent tokens, and per second.

wall-clock gain = token gain × throughput. The token gain is in equivalent tokens if there is a ladder, else step-wise.
Throughput comes from isolated step timings if both models have them, else from the training runs. The interval of the
product includes the errors of both factors, so it is never narrower than either.

A study states only gains whose speeds are known, corrects intervals for the number of variants, and shrinks the best.

Holm (1979): of m variants the one with the smallest p is tested at α/m, the next at α/(m − 1), and so on to the first
that is not significant; it and the rest are tested at its level. p is the smallest α at which the interval excludes 1
(for Δ loss, 0). The probability of declaring a gain for any variant without one is at most α.

The best of several is selected after looking, so its estimate is too high. Partial pooling models ln gains
y ~ N(θ, s²) with θ ~ N(μ, τ²) and τ² = var(y) − mean(s²), at least 0: the shrunk ln gain is μ + τ²/(τ² + s²)·(y − μ).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from residua.study.ladder import Gain
from residua.study.records import RunRecord
from residua.study.statistics import (
    Interval,
    estimate_ratio,
    geometric_mean,
    mean,
    p_below,
    step_gain,
    t_quantile,
    tokens_to_reach,
    variance,
)
from residua.study.timing import ROUNDS, StepTiming

if TYPE_CHECKING:
    from residua.study.results import ProjectedGain, StudyResult, VariantResult

Runs = Mapping[int, RunRecord]  # by seed
PlannedRuns = Mapping[int, RunRecord | None]  # None: failed, or not trained yet
Timings = Mapping[str, StepTiming]  # by device
MIN_SEEDS = 3
"""Minimum seeds to show a gain without a ladder, or to win a race."""
MAX_TELLING_WIDTH = 2.0
"""high / low of an interval around 1; a wider one gives no verdict."""
MIN_POOLED_VARIANTS = 3
"""Minimum number of variants for shrinkage."""
MIN_P = 1e-16


def compare(
    ours: Runs,
    baseline: Runs,
    equivalent: Gain | None,
    timings: Timings,
    baseline_timings: Timings,
    confidence: float,
) -> dict[str, Any]:
    """The gains of a variant's complete runs, as fields of VariantResult; None if not measured.

    `equivalent` is its gain in tokens from a ladder.
    """
    pairs = [(ours[seed], baseline[seed]) for seed in sorted(ours.keys() & baseline.keys())]
    steps = [gain for a, b in pairs if (gain := step_gain(a.loss_curve, b.loss_curve)) is not None]
    step = estimate_ratio(steps, confidence) if steps else None
    alone = [(timings[device], baseline_timings[device]) for device in timings if device in baseline_timings]
    speeds = [a.tokens_per_second / b.tokens_per_second for a, b in pairs if a.hardware == b.hardware]
    speeds = [speed for speed in speeds if math.isfinite(speed)]  # some may be unknown
    throughput = estimate_ratio(speeds, confidence) if speeds else None
    if alone:
        throughput = timed_ratio(*alone[-1], confidence)
    return {
        "step_gain": step,
        "equivalent_tokens": None if equivalent is None else equivalent.interval,
        "extrapolated": equivalent is not None and equivalent.extrapolated,
        "throughput_ratio": throughput,
        "wall_clock_gain": product(equivalent or step, throughput),
        "timing": alone[-1][0] if alone else None,
    }


def timed_ratio(ours: StepTiming, baseline: StepTiming, confidence: float) -> Interval:
    """Our tokens per second over the baseline's, both timed in isolation: Welch's interval of the logarithms."""
    ratio, errors = ours.tokens_per_second / baseline.tokens_per_second, ours.errors(baseline)
    error = math.hypot(*errors)
    if error == 0.0:
        return Interval(ratio, ROUNDS, 0.0, ratio, ratio)
    freedom = (ROUNDS - 1) * error**4 / math.fsum(each**4 for each in errors)
    factor = math.exp(t_quantile(0.5 + confidence / 2, freedom) * error)
    return Interval(ratio, ROUNDS, error, ratio / factor, ratio * factor, freedom)


def product(gain: Interval | None, speed: Interval | None) -> Interval | None:
    """The product of two independent ratios. Its interval adds the squares of their log half-widths.

    Each side is computed separately (Zou and Donner, 2008), since the interval of a gain may be asymmetric. An open
    side stays open; if either factor lacks an interval, so does the product.
    """
    if gain is None or speed is None:
        return None
    value, count = gain.value * speed.value, gain.count
    error = None if gain.error is None or speed.error is None else math.hypot(gain.error, speed.error)
    freedom = _joint_freedom([gain, speed])

    def width(end: float | None, other: float | None) -> float | None:
        """The log distance from the product to one end of its interval."""
        if end is None or other is None:
            return None
        return math.hypot(math.log(end / gain.value), math.log(other / speed.value))

    down, up = width(gain.low, speed.low), width(gain.high, speed.high)
    low, high = (None if down is None else value * math.exp(-down)), (None if up is None else value * math.exp(up))
    return Interval(value, count, error, low, high, freedom)


def _joint_freedom(factors: Sequence[Interval]) -> float | None:
    """Welch–Satterthwaite degrees of freedom of a sum of logarithms; None if a factor's are unknown."""
    known = [(factor.error, factor.freedom) for factor in factors if factor.error and factor.freedom]
    if len(known) < sum(factor.error != 0.0 for factor in factors) or not known:
        return None
    return math.fsum(error**2 for error, _ in known) ** 2 / math.fsum(error**4 / freedom for error, freedom in known)


def race(
    ours: PlannedRuns,
    baseline: PlannedRuns,
    target: float,
    timing: StepTiming | None,
    timed: StepTiming | None,
    confidence: float,
) -> Race:
    """The tokens and seconds that runs need to reach a validation loss, compared with the baseline.

    Seconds are tokens × the isolated step time, with both models timed in one session. p comes from Welch's one-sided
    t-test of ln seconds, including the errors of both timings. It is None unless every planned run of both sides,
    `MIN_SEEDS` or more, reached the loss. If any run had reached it by its first validation, no tokens are given.
    """
    curves = [[run.loss_curve if run else [] for run in runs.values()] for runs in (ours, baseline)]
    tokens, reference = ([reached for curve in side if (reached := tokens_to_reach(target, curve))] for side in curves)
    early = any(curve and curve[0][1] <= target for side in curves for curve in side)
    of_tokens = estimate_ratio(tokens, confidence) if tokens and not early else None
    if of_tokens is None or timing is None or timed is None or timing.device != timed.device:
        return Race(len(ours), len(tokens), of_tokens)
    speed = Interval(timing.tokens_per_second, ROUNDS, timing.error, freedom=ROUNDS - 1.0)
    seconds = Interval(of_tokens.value / speed.value, len(tokens))
    whole = len(tokens) == len(ours) and len(reference) == len(baseline)
    if ours is baseline or not whole or min(len(tokens), len(reference)) < MIN_SEEDS:
        return Race(len(ours), len(tokens), of_tokens, seconds)
    parts = [(variance([math.log(each) for each in side]) / len(side), len(side) - 1) for side in (tokens, reference)]
    parts += [(error**2, ROUNDS - 1) for error in timing.errors(timed)]
    spread = math.fsum(square for square, _ in parts)
    freedom = spread**2 / math.fsum(square**2 / degrees for square, degrees in parts) if spread else 1.0
    ratio = seconds.value * timed.tokens_per_second / geometric_mean(reference)
    error = math.sqrt(spread)
    factor = math.exp(t_quantile(0.5 + confidence / 2, freedom) * error)
    of_seconds = Interval(ratio, len(tokens), error, ratio / factor, ratio * factor, freedom)
    return Race(len(ours), len(tokens), of_tokens, seconds, of_seconds, p_below(math.log(ratio), error, freedom))


@dataclass(frozen=True)
class Race:
    """Runs, how many reached the loss, tokens and seconds to it, seconds / the baseline's, and p for fewer seconds.

    `adjusted` is p after Holm's correction over the variants of a size.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # stored in results.json

    runs: int
    reached: int
    tokens: Interval | None = None
    seconds: Interval | None = None
    ratio: Interval | None = None
    p: float | None = None
    adjusted: float | None = None


def adjusted(races: Mapping[str, Race]) -> dict[str, Race]:
    """The races with Holm's p: of m, the smallest × m, the next × (m − 1), and so on, none below the one before."""
    known = sorted((race.p, name) for name, race in races.items() if race.p is not None)
    after, least = dict(races), 0.0
    for place, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - place)))
        after[name] = replace(races[name], adjusted=least)
    return after


def concluded(result: StudyResult) -> StudyResult:
    """Drop the gains per second that the study cannot state, and correct and shrink the intervals."""
    unstated = {"wall_clock_gain": None}
    rows = [row if speed_is_shown(row, result) else row.model_copy(update=unstated) for row in result.variants]
    keys = ("corrected", "equivalent_corrected", "difference_corrected", "shrunk")
    intervals: dict[int, dict[str, Interval | None]] = {
        index: dict.fromkeys(keys) for index, row in enumerate(rows) if row.name != result.baseline
    }
    alpha = 1.0 - result.confidence
    for size in result.sizes:
        compared = {i: rows[i] for i in intervals if rows[i].size == size}
        factors = {i: (row.equivalent_tokens or row.step_gain, row.throughput_ratio) for i, row in compared.items()}
        families = {
            "corrected": {i: of_ratio(row.wall_clock_gain, factors[i], alpha) for i, row in compared.items()},
            "equivalent_corrected": {i: of_ratio(row.equivalent_tokens, (), alpha) for i, row in compared.items()},
            "difference_corrected": {i: _of_change(row.difference, alpha) for i, row in compared.items()},
        }
        for key, family in families.items():
            for i, value in corrected(family, alpha).items():
                intervals[i][key] = value
        seconds = {i: row.wall_clock_gain for i, row in compared.items()}
        for i, value in shrunk({i: gain for i, gain in seconds.items() if gain is not None}).items():
            intervals[i]["shrunk"] = value
    again = tuple(row.model_copy(update=intervals.get(index, {})) for index, row in enumerate(rows))
    projected = _projected(result.projected, {row.name: row for row in again if row.size == result.sizes[-1]}, alpha)
    return result.model_copy(update={"variants": again, "projected": projected})


def _projected(
    gains: Sequence[ProjectedGain], largest: Mapping[str, VariantResult], alpha: float
) -> tuple[ProjectedGain, ...]:
    """Add gains per second at the speed of the largest size, if that is stated, and correct the intervals."""
    speeds = [
        row.throughput_ratio if (row := largest.get(gain.name)) and row.wall_clock_gain else None for gain in gains
    ]
    seconds = [product(gain.tokens, speed) for gain, speed in zip(gains, speeds, strict=True)]
    tested = {i: of_ratio(gain.tokens, (), alpha) for i, gain in enumerate(gains)}
    timed = {i: of_ratio(seconds[i], [gain.tokens, speeds[i]], alpha) for i, gain in enumerate(gains)}
    after, after_timed = corrected(tested, alpha), corrected(timed, alpha)
    return tuple(
        gain.model_copy(
            update={"corrected": after.get(i), "seconds": seconds[i], "seconds_corrected": after_timed.get(i)}
        )
        for i, gain in enumerate(gains)
    )


@dataclass(frozen=True)
class Tested:
    """An estimate and how its interval widens with the level: `parts` are (standard error, degrees of freedom).

    `down` and `up` are the distances to the ends at `alpha`, None if open. For a ratio, all are in logarithms.
    """

    __test__ = False  # pytest: not a test class

    interval: Interval
    value: float
    down: float | None
    up: float | None
    parts: tuple[tuple[float, float], ...]
    alpha: float
    is_ratio: bool

    def _width(self, alpha: float) -> float:
        from scipy.special import stdtrit  # needed only for finished studies

        return math.hypot(*(-error * float(stdtrit(freedom, alpha / 2)) for error, freedom in self.parts))

    @property
    def p(self) -> float:
        """The smallest α at which the interval excludes "no difference"; 1 if that side is open."""
        width = self.down if self.value > 0 else self.up
        if width is None or self.value == 0.0:
            return 1.0
        if width == 0.0:
            return MIN_P
        target = abs(self.value) / width * self._width(self.alpha)
        low, high = math.log(MIN_P), 0.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._width(math.exp(middle)) > target else (low, middle)
        return math.exp(high)

    def at(self, alpha: float) -> Interval:
        """The estimate with its interval at this level."""
        factor = self._width(alpha) / self._width(self.alpha)
        low = None if self.down is None else self.value - self.down * factor
        high = None if self.up is None else self.value + self.up * factor
        if self.is_ratio:
            low, high = (None if end is None else math.exp(end) for end in (low, high))
        return replace(self.interval, low=low, high=high)


def of_ratio(gain: Interval | None, factors: Sequence[Interval | None], alpha: float) -> Tested | None:
    """A gain, whose interval widens with those of its factors, each with its own degrees of freedom."""
    if gain is None or gain.ends is None:
        return None
    value = math.log(gain.value)
    parts = [
        (half / t_quantile(1 - alpha / 2, _freedom(factor)), _freedom(factor))
        for factor in factors
        if factor is not None and (half := _half(factor, value > 0))
    ]
    down, up = (None if end is None else abs(math.log(end) - value) for end in (gain.low, gain.high))
    return Tested(gain, value, down, up, tuple(parts) or ((1.0, _freedom(gain)),), alpha, is_ratio=True)


def _half(factor: Interval, below: bool) -> float | None:
    """The log distance to the deciding end, or to the other end if that one is open."""
    ends = (factor.low, factor.high) if below else (factor.high, factor.low)
    end = next((end for end in ends if end is not None), None)
    return None if end is None else abs(math.log(factor.value / end))


def _of_change(change: Interval | None, alpha: float) -> Tested | None:
    if change is None or change.ends is None:
        return None
    down, up = (None if end is None else abs(end - change.value) for end in (change.low, change.high))
    return Tested(change, change.value, down, up, ((1.0, _freedom(change)),), alpha, is_ratio=False)


def _freedom(interval: Interval) -> float:
    return interval.freedom or max(interval.count - 1.0, 1.0)


def corrected(family: Mapping[int, Tested | None], alpha: float) -> dict[int, Interval]:
    """The intervals at Holm's levels: each excludes "no difference" exactly when the procedure rejects it.

    Estimates without an interval (None) are not tested.
    """
    known = {key: tested for key, tested in family.items() if tested is not None}
    intervals, level, going_on = {}, alpha, True
    for place, (p, key) in enumerate(sorted((tested.p, key) for key, tested in known.items())):
        if going_on:
            level = alpha / (len(known) - place)
            going_on = p <= level
        intervals[key] = known[key].at(level)
    return intervals


def shrunk(gains: Mapping[int, Interval]) -> dict[int, Interval]:
    """Shrink gains towards their mean, according to their errors and spread; empty if there are too few.

    Intervals shift with them and keep their width: a few variants do not determine the spread well enough to narrow
    them.
    """
    known = {key: gain for key, gain in gains.items() if gain.error}
    if len(known) < MIN_POOLED_VARIANTS:
        return {}
    logs = [math.log(gain.value) for gain in known.values()]
    variances = [gain.error**2 for gain in known.values() if gain.error]
    between = max(0.0, variance(logs) - mean(variances))
    weights = [1 / (own_variance + between) for own_variance in variances]
    centre = math.fsum(w * y for w, y in zip(weights, logs, strict=True)) / math.fsum(weights)
    pooled = {}
    for (key, gain), y, own_variance in zip(known.items(), logs, variances, strict=True):
        moved = math.exp(own_variance / (between + own_variance) * (centre - y))
        low, high = (None if end is None else end * moved for end in (gain.low, gain.high))
        pooled[key] = replace(gain, value=gain.value * moved, low=low, high=high)
    return pooled


def comparisons(size: str, result: StudyResult) -> int:
    """How many gains per second at a size enter the multiple-comparison correction."""
    return sum(row.corrected is not None for row in result.rows(size))


def pays(row: VariantResult) -> bool:
    """Whether the variant gains per second, significantly after correction."""
    return enough_runs(row) and row.corrected is not None and row.corrected.above(1.0)


def loses(row: VariantResult) -> bool:
    """Whether the variant loses per second, significantly after correction."""
    return enough_runs(row) and row.corrected is not None and row.corrected.below(1.0)


def is_lower(row: VariantResult) -> bool:
    """Whether the loss is lower, significantly after correction."""
    return row.difference_corrected is not None and row.difference_corrected.below(0.0)


def enough_runs(row: VariantResult) -> bool:
    """Whether a gain is based on three seeds, or on a ladder, whose runs are pooled."""
    gain, tokens = row.wall_clock_gain, row.equivalent_tokens
    return gain is not None and (gain.count >= MIN_SEEDS or (tokens is not None and tokens.ends is not None))


def speed_problem(row: VariantResult, result: StudyResult) -> Literal["", "unknown", "shared", "busy", "scattered"]:
    """Why a variant's speed supports no conclusion: runs shared the machine, or other programs kept it busy.

    An isolated step timing is compared with the baseline's on the same device. Empty if the speed is known well enough.
    """
    if row.throughput_ratio is None:
        return "unknown"
    if row.timing is None:
        if result.side_by_side > 1:
            return "shared"
    else:
        baseline = next((other.timing for other in result.rows(row.size) if other.name == result.baseline), None)
        if row.timing.busy or (baseline is not None and baseline.device == row.timing.device and baseline.busy):
            return "busy"
    return "scattered" if says_nothing(row.throughput_ratio) else ""


def speed_is_shown(row: VariantResult, result: StudyResult) -> bool:
    """Whether a variant's speed is known well enough to draw conclusions from it."""
    return not speed_problem(row, result)


def says_nothing(ratio: Interval) -> bool:
    """Whether a ratio's interval contains 1 and is too wide for a verdict."""
    if ratio.ends is None:
        return False  # one run: there is no interval
    low, high = ratio.ends
    return ratio.holds(1.0) and not high <= MAX_TELLING_WIDTH * low
