"""Statistics for few runs: standard errors, t-intervals, the tokens a curve needs to reach a loss, power laws.

Studies have two to five seeds, so every interval uses Student's t; with one seed there is no interval (`None`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pydantic import ConfigDict

from residua.errors import UserError


@dataclass(frozen=True)
class Interval:
    """A mean over `count` runs, its standard error and its confidence interval; null if there is only one run.

    An interval of equivalent tokens can be open: then only one of `low` and `high` is null. `freedom` is its degrees of
    freedom.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # stored in results.json

    value: float
    count: int
    error: float | None = None
    low: float | None = None
    high: float | None = None
    freedom: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Both ends, infinite if open; None without an interval."""
        if self.low is None and self.high is None:
            return None
        return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)

    def above(self, value: float) -> bool:
        """Whether the whole interval lies above a value."""
        return self.low is not None and self.low > value

    def below(self, value: float) -> bool:
        """Whether the whole interval lies below a value."""
        return self.high is not None and self.high < value

    def holds(self, value: float) -> bool:
        """Whether the interval contains a value; without an interval, every value counts as contained."""
        return not (self.above(value) or self.below(value))

    def exp(self) -> Interval:
        """The interval of exp(x), for an interval of the logarithm x; the error stays relative."""
        low, high = (None if end is None else math.exp(end) for end in (self.low, self.high))
        return replace(self, value=math.exp(self.value), low=low, high=high)


def count(number: float) -> str:
    """1,234,567 as 1.23 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:.0f}"


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


def estimate(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Mean, standard error s/√n and the t-interval mean ± t(n−1)·s/√n."""
    count = len(values)
    if count < 2:
        return Interval(mean(values), count)
    return _interval(mean(values), math.sqrt(variance(values) / count), count - 1, count, confidence)


def estimate_ratio(ratios: Sequence[float], confidence: float = 0.95) -> Interval:
    """The geometric mean of ratios, with a t-interval computed from their logarithms.

    With logarithms, "twice" and "half" weigh the same. The error is that of the logarithm, hence relative.
    """
    return estimate([math.log(ratio) for ratio in ratios], confidence).exp()


def paired_difference(ours: dict[int, float], baseline: dict[int, float], confidence: float = 0.95) -> Interval | None:
    """ours − baseline by seed: a t-interval over the differences at shared seeds.

    Runs with the same seed share their data order, and pairing removes its effect. Without a shared seed, Welch's
    interval for two independent samples is used. None if either side has no run.
    """
    shared = sorted(ours.keys() & baseline.keys())
    if shared:
        return estimate([ours[seed] - baseline[seed] for seed in shared], confidence)
    if not ours or not baseline:
        return None
    return _welch(list(ours.values()), list(baseline.values()), confidence)


def _welch(ours: Sequence[float], baseline: Sequence[float], confidence: float) -> Interval:
    difference, count = mean(ours) - mean(baseline), min(len(ours), len(baseline))
    if count < 2:
        return Interval(difference, count)
    a, b = variance(ours) / len(ours), variance(baseline) / len(baseline)
    if a + b == 0.0:
        return Interval(difference, count, 0.0, difference, difference)
    freedom = (a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(baseline) - 1))
    return _interval(difference, math.sqrt(a + b), freedom, count, confidence)


def _interval(value: float, error: float, freedom: float, count: int, confidence: float) -> Interval:
    half = t_quantile(0.5 + confidence / 2, freedom) * error
    return Interval(value, count, error, value - half, value + half, freedom)


def tokens_to_reach(loss: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """The tokens at which a validation curve [(tokens, loss), ...] is first at or below `loss`.

    Interpolates linearly between validations. None if the curve never reaches it. If the first point is already below,
    returns its tokens.
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
    """Baseline tokens / our tokens to reach the same loss: the worse of the two final losses, which both reach.

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
    """Exponential moving average over about `window` points, with start-up bias corrected: for plotting only."""
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
    from scipy.special import stdtrit  # needed only for finished studies; importing scipy.stats takes a second longer

    return float(stdtrit(freedom, probability))


def p_below(difference: float, error: float, freedom: float) -> float:
    """One-sided p by Student's t: the chance, without a true difference, of one at least this far below 0."""
    from scipy.special import stdtr

    return float(stdtr(freedom, difference / error)) if error > 0 else float(difference >= 0)


@dataclass(frozen=True)
class PowerLaw:
    """Compute scaling L = A·C^−α as ln L = log_scale − exponent·ln C, with the terms the interval needs.

    A plain power law, as in the Attention Residuals paper: least squares of ln L on ln C over every run (each size and
    seed is one point). L is the final validation loss in nats per token, C the training FLOPs.
    """

    log_scale: float
    exponent: float
    centre: float  # mean of ln C
    spread: float  # Σ (ln C − centre)²
    residual: float  # Σ of squared residuals of ln L
    count: int

    @property
    def scale(self) -> float:
        """A of L = A·C^−α; infinite if nearly equal sizes give an absurd α."""
        return _exp(self.log_scale)

    def loss(self, compute: float) -> float:
        """The fitted loss at this compute."""
        return math.exp(self.log_scale - self.exponent * math.log(compute))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """Fit the power law to [(compute, loss), ...], which needs at least two different compute values."""
    if any(compute <= 0 or loss <= 0 for compute, loss in points):
        raise UserError("a power law needs positive compute and loss at every point")
    x = [math.log(compute) for compute, _ in points]
    y = [math.log(loss) for _, loss in points]
    centre = mean(x) if x else 0.0
    spread = math.fsum((value - centre) ** 2 for value in x)
    if spread <= 1e-12:
        raise UserError("a power law needs runs of at least two sizes: name more in scaling.sizes")
    slope = math.fsum((a - centre) * b for a, b in zip(x, y, strict=True)) / spread
    log_scale = mean(y) - slope * centre
    residual = math.fsum((b - log_scale - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return PowerLaw(log_scale, -slope, centre, spread, residual, len(points))


def compute_advantage(ours: PowerLaw, baseline: PowerLaw, compute: float, confidence: float = 0.95) -> Interval | None:
    """C_b / C: the compute that the baseline needs for the loss our fit has at `compute`, over `compute`.

    ln(C_b/C) = (a_b − a_o + α_o ln C)/α_b − ln C. The interval is analytic (delta method) with one residual variance
    pooled over both fits and n_b + n_o − 4 degrees of freedom; with none left there is no interval. It is slightly too
    wide if both variants share seeds, and too narrow if the power law does not hold, because runs of one size share the
    misfit. Returns None if the baseline's loss does not fall with compute.
    """
    if baseline.exponent <= 0:
        return None
    x = math.log(compute)
    ours_log = ours.log_scale - ours.exponent * x
    log_gain = (baseline.log_scale - ours_log) / baseline.exponent - x
    count, freedom = min(ours.count, baseline.count), ours.count + baseline.count - 4
    if freedom < 1:
        return Interval(_exp(log_gain), count)
    pooled = (ours.residual + baseline.residual) / freedom
    # Variance of each fit's prediction of ln L at its evaluation point: ours at x, the baseline's at x + log_gain.
    ours_variance = pooled * (1 / ours.count + (x - ours.centre) ** 2 / ours.spread)
    read = x + log_gain
    baseline_variance = pooled * (1 / baseline.count + (read - baseline.centre) ** 2 / baseline.spread)
    error = math.sqrt(ours_variance + baseline_variance) / baseline.exponent
    half = t_quantile(0.5 + confidence / 2, freedom) * error
    return Interval(_exp(log_gain), count, error, _exp(log_gain - half), _exp(log_gain + half))
