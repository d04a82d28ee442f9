"""Small statistics for few runs: standard errors, t-intervals, and the tokens a curve needs to reach a loss.

Studies have two to five seeds, so every interval uses Student's t; with one seed there is no interval (`None`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from residua.errors import UserError


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` runs, its standard error, and the confidence interval [low, high] (None when count is 1).

    `freedom` are the degrees of freedom of the interval.
    """

    value: float
    count: int
    error: float | None = None
    low: float | None = None
    high: float | None = None
    freedom: float | None = None


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean; at least one value."""
    return math.fsum(values) / len(values)


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean ln x); at least one value. A ratio of such means is the mean of the ratios."""
    return math.exp(mean([math.log(value) for value in values]))


def variance(values: Sequence[float]) -> float:
    """The unbiased sample variance, Σ(x − mean)² / (n − 1); at least two values."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Mean, standard error s/√n and the t-interval mean ± t(n−1)·s/√n."""
    count = len(values)
    if count < 2:
        return Estimate(mean(values), count)
    return _interval(mean(values), math.sqrt(variance(values) / count), count - 1, count, confidence)


def estimate_ratio(ratios: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The geometric mean of ratios, with a t-interval computed from their logarithms.

    With logarithms, "twice" and "half" weigh the same. The error is that of the logarithm, that is, relative.
    """
    logs = estimate([math.log(ratio) for ratio in ratios], confidence)
    low, high = (None if edge is None else math.exp(edge) for edge in (logs.low, logs.high))
    return Estimate(math.exp(logs.value), logs.count, logs.error, low, high, logs.freedom)


def paired_difference(ours: dict[int, float], baseline: dict[int, float], confidence: float = 0.95) -> Estimate | None:
    """ours − baseline by seed: a t-interval over the differences of the seeds both have.

    Runs with the same seed share their data order, and pairing removes its effect. Without a shared seed, uses Welch's
    interval for two independent samples. None if either side has no run.
    """
    shared = sorted(ours.keys() & baseline.keys())
    if shared:
        return estimate([ours[seed] - baseline[seed] for seed in shared], confidence)
    if not ours or not baseline:
        return None
    return _welch(list(ours.values()), list(baseline.values()), confidence)


def _welch(ours: Sequence[float], baseline: Sequence[float], confidence: float) -> Estimate:
    difference, count = mean(ours) - mean(baseline), min(len(ours), len(baseline))
    if count < 2:
        return Estimate(difference, count)
    a, b = variance(ours) / len(ours), variance(baseline) / len(baseline)
    if a + b == 0.0:
        return Estimate(difference, count, 0.0, difference, difference)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(baseline) - 1))
    return _interval(difference, math.sqrt(a + b), freedom, count, confidence)


def _interval(value: float, error: float, freedom: float, count: int, confidence: float) -> Estimate:
    half = t_quantile(0.5 + confidence / 2, freedom) * error
    return Estimate(value, count, error, value - half, value + half, freedom)


def tokens_to_reach(loss: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The tokens at which a validation curve [(tokens, loss), ...] is first at or below `loss`.

    Linear between two validations. None if the curve never gets there. If the first point is already below, returns
    its tokens.
    """
    before: tuple[float, float] | None = None
    for tokens, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return tokens
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (tokens - before[0])
        before = (tokens, value)
    return None


def step_gain(ours: Sequence[tuple[float, float]], baseline: Sequence[tuple[float, float]]) -> float | None:
    """Baseline tokens / our tokens to reach the same loss: the worse of the two final losses, which both reached.

    Above 1, we need fewer tokens. Both curves must have the same number of tokens and the same schedule. None if a
    curve has fewer than two points, since the crossing is interpolated.
    """
    if len(ours) < 2 or len(baseline) < 2:
        return None
    target = max(ours[-1][1], baseline[-1][1])
    needed, reference = tokens_to_reach(target, ours), tokens_to_reach(target, baseline)
    if not needed or not reference:
        return None
    return reference / needed


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Exponential moving average over about `window` points, corrected for its start: what the eye should follow."""
    keep = 1.0 - 1.0 / max(window, 1.0)
    total = weight = 0.0
    result = []
    for value in values:
        total = keep * total + (1.0 - keep) * value
        weight = keep * weight + (1.0 - keep)
        result.append(total / weight)
    return result


@cache
def t_quantile(probability: float, freedom: float) -> float:
    """The value that a Student-t variable with `freedom` degrees of freedom stays below with this probability."""
    if not 0.0 < probability < 1.0 or freedom <= 0.0:
        raise UserError(f"t_quantile needs 0 < probability < 1 and freedom > 0, not {probability} and {freedom}")
    from scipy.special import stdtrit  # only a finished study needs it; scipy.stats takes a second more to import

    return float(stdtrit(freedom, probability))
