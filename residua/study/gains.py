"""What a variant gains over the baseline: per step on one schedule's curve, in equivalent tokens, and per second.

wall-clock gain = token gain × throughput. The token gain is in equivalent tokens if there is a ladder, else step-wise.
Throughput is that of steps timed alone if both were, else that of the training runs. The interval of the product has
the errors of both factors, so it is never narrower than that of either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from residua.study.ladder import Gain, equivalent_tokens
from residua.study.runs import RunRecord
from residua.study.statistics import Estimate, estimate_ratio, step_gain, t_quantile
from residua.study.timing import BLOCKS, StepTiming

Runs = Mapping[int, RunRecord]  # by seed
Timings = Mapping[str, StepTiming]  # by device


@dataclass(frozen=True)
class Gains:
    """A variant against the baseline; None where it was not measured. `equivalent` is null without a ladder."""

    step: Estimate | None
    equivalent: Gain | None
    throughput: Estimate | None
    wall_clock: Estimate | None
    timing: StepTiming | None


def compare(
    ours: Runs,
    baseline: Runs,
    ladder: Mapping[float, Mapping[int, float]],
    timings: Timings,
    baseline_timings: Timings,
    confidence: float,
) -> Gains:
    """The gains of a variant's complete runs; `ladder` has the baseline's losses by tokens and seed, or nothing."""
    shared = sorted(ours.keys() & baseline.keys())
    found = {seed: step_gain(ours[seed].loss_curve, baseline[seed].loss_curve) for seed in shared}
    steps = {seed: gain for seed, gain in found.items() if gain is not None}
    speeds = {seed: speed for seed in shared if (speed := _speed(ours[seed], baseline[seed])) is not None}
    step = _mean(list(steps.values()), confidence)
    alone = [(timings[device], baseline_timings[device]) for device in timings if device in baseline_timings]
    timing = alone[-1][0] if alone else None
    throughput = timed_ratio(*alone[-1], confidence) if alone else _mean(list(speeds.values()), confidence)
    equivalent = _equivalent(ladder, ours, confidence)
    return Gains(step, equivalent, throughput, product(equivalent or step, throughput), timing)


def _speed(ours: RunRecord, baseline: RunRecord) -> float | None:
    """The ratio of two runs' speeds; None if one is not known, or if they were trained on different hardware."""
    ratio = ours.tokens_per_second / baseline.tokens_per_second
    return ratio if math.isfinite(ratio) and ours.hardware == baseline.hardware else None


def _equivalent(ladder: Mapping[float, Mapping[int, float]], ours: Runs, confidence: float) -> Gain | None:
    if not ladder:
        return None
    tokens = max(run.tokens for run in ours.values())
    return equivalent_tokens(ladder, {seed: run.final_loss for seed, run in ours.items()}, tokens, confidence)


def timed_ratio(ours: StepTiming, baseline: StepTiming, confidence: float) -> Estimate:
    """Our tokens per second over the baseline's, both timed alone: Welch's interval of the logarithms."""
    ratio = ours.tokens_per_second / baseline.tokens_per_second
    error = math.hypot(ours.error, baseline.error)
    if error == 0.0:
        return Estimate(ratio, BLOCKS, 0.0, ratio, ratio)
    freedom = (BLOCKS - 1) * error**4 / (ours.error**4 + baseline.error**4)
    factor = math.exp(t_quantile(0.5 + confidence / 2, freedom) * error)
    return Estimate(ratio, BLOCKS, error, ratio / factor, ratio * factor, freedom)


def product(gain: Estimate | Gain | None, speed: Estimate | None) -> Estimate | None:
    """The product of two independent ratios. Its interval adds the squares of their half-widths in logarithms.

    Each side by itself (Zou and Donner, 2008), since the interval of a gain need not be symmetric; an open side stays
    open, and without both intervals there is none.
    """
    if gain is None or speed is None:
        return None
    value, count = gain.value * speed.value, gain.count
    error = None if gain.error is None or speed.error is None else math.hypot(gain.error, speed.error)
    freedom = _joint_freedom([gain, speed])
    down, up = _width(gain, gain.low, speed, speed.low), _width(gain, gain.high, speed, speed.high)
    low, high = (None if down is None else value * math.exp(-down)), (None if up is None else value * math.exp(up))
    return Estimate(value, count, error, low, high, freedom)


def _joint_freedom(factors: Sequence[Estimate | Gain]) -> float | None:
    """Welch and Satterthwaite's degrees of freedom of a sum of logarithms; None if a factor's are not known."""
    known = [(factor.error, factor.freedom) for factor in factors if factor.error and factor.freedom]
    if len(known) < sum(factor.error != 0.0 for factor in factors) or not known:
        return None
    return math.fsum(error**2 for error, _ in known) ** 2 / math.fsum(error**4 / freedom for error, freedom in known)


def _width(gain: Estimate | Gain, gain_end: float | None, speed: Estimate, speed_end: float | None) -> float | None:
    """The distance in logarithms from a product to one end of its interval."""
    if gain_end is None or speed_end is None:
        return None
    return math.hypot(math.log(gain_end / gain.value), math.log(speed_end / speed.value))


def _mean(ratios: list[float], confidence: float) -> Estimate | None:
    return estimate_ratio(ratios, confidence) if ratios else None
