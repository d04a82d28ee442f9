"""Compute scaling: L = A·C^−α per variant, and how much compute a variant saves.

A plain power law, as in the Attention Residuals paper: least squares of ln L on ln C over every run (each size and
seed is one point). L is the final validation loss in nats per token, C the training FLOPs: FLOPs per token × tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from residua.errors import UserError
from residua.study.statistics import Estimate, mean, t_quantile


@dataclass(frozen=True)
class PowerLaw:
    """The fit ln L = log_scale − exponent·ln C, with what the interval needs."""

    log_scale: float
    exponent: float
    centre: float  # mean of ln C
    spread: float  # Σ (ln C − centre)²
    residual: float  # Σ of squared residuals of ln L
    count: int

    @property
    def scale(self) -> float:
        """A of L = A·C^−α; infinite where sizes too near each other give an absurd α."""
        return _exp(self.log_scale)

    def loss(self, compute: float) -> float:
        """The fitted loss at this compute."""
        return math.exp(self.log_scale - self.exponent * math.log(compute))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def fit(points: Sequence[tuple[float, float]]) -> PowerLaw:
    """The power law through [(compute, loss), ...]; at least two different computes."""
    if any(compute <= 0 or loss <= 0 for compute, loss in points):
        raise UserError("a power law needs positive compute and loss at every point")
    x = [math.log(compute) for compute, _ in points]
    y = [math.log(loss) for _, loss in points]
    centre = mean(x) if x else 0.0
    spread = math.fsum((value - centre) ** 2 for value in x)
    if spread <= 1e-12:
        raise UserError("a power law needs runs at two sizes at least: name more in scaling.sizes")
    slope = math.fsum((a - centre) * b for a, b in zip(x, y, strict=True)) / spread
    log_scale = mean(y) - slope * centre
    residual = math.fsum((b - log_scale - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    return PowerLaw(log_scale, -slope, centre, spread, residual, len(points))


def advantage(ours: PowerLaw, baseline: PowerLaw, compute: float, confidence: float = 0.95) -> Estimate | None:
    """C_b / C: the compute that the baseline needs for the loss our fit has at `compute`, over `compute`.

    ln(C_b/C) = (a_b − a_o + α_o ln C)/α_b − ln C. The interval is analytic (delta method) with one residual variance
    pooled over both fits and n_b + n_o − 4 degrees of freedom; with no degree of freedom left there is no interval.
    It is a little too wide if both variants share seeds, and too narrow if the power law does not hold, because runs of
    one size share the misfit. Returns None if the baseline's loss does not fall with compute.
    """
    if baseline.exponent <= 0:
        return None
    x = math.log(compute)
    ours_log = ours.log_scale - ours.exponent * x
    log_gain = (baseline.log_scale - ours_log) / baseline.exponent - x
    count, freedom = min(ours.count, baseline.count), ours.count + baseline.count - 4
    if freedom < 1:
        return Estimate(_exp(log_gain), count)
    pooled = (ours.residual + baseline.residual) / freedom
    # Variance of each fit's prediction of ln L where it is evaluated: ours at x, the baseline's at x + log_gain.
    ours_variance = pooled * (1 / ours.count + (x - ours.centre) ** 2 / ours.spread)
    read = x + log_gain
    baseline_variance = pooled * (1 / baseline.count + (read - baseline.centre) ** 2 / baseline.spread)
    error = math.sqrt(ours_variance + baseline_variance) / baseline.exponent
    half = t_quantile(0.5 + confidence / 2, freedom) * error
    return Estimate(_exp(log_gain), count, error, _exp(log_gain - half), _exp(log_gain + half))
