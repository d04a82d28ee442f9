"""Equivalent tokens: how long the baseline would have to train to reach a variant's loss (docs/compare.md).

The baseline is trained at several budgets D_j, each with its own full schedule. Through their losses goes

    L(D) = E + B·D^−b          with B > 0, b > 0, E ≥ 0

by least squares, or with only two budgets a straight line in ln D. A variant that was trained on D tokens to a loss L_v
has equivalent tokens D' with L(D') = L_v, and the gain D'/D.

All runs enter one regression, loss = L(D) + s_seed + noise for the baseline and loss = L_v + s_seed + noise for the
variant. Runs of one seed share their data order; the seed effects s absorb it as pairing does. The interval holds every
gain g that a t-test does not reject, |L(g·D) − L_v| ≤ t·se (Fieller's way): the standard error is that of a
fitted value at a known place, which stays honest where the error of a quotient does not. It assumes that seeds of the
variant and of the baseline scatter alike. A line through two budgets cuts across the curve, so it has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from residua.study.statistics import Interval, t_quantile

Array = NDArray[np.float64]
Losses = Mapping[int, float]  # final loss by seed
MIN_BUDGETS_OF_LAW = 3
MAX_REACH = 4.0
"""Equivalent tokens are looked for up to this multiple of the largest budget, and down to this part of the smallest."""
_EXPONENTS = np.geomspace(0.01, 3.0, 240)
_PLACES = 1001


@dataclass(frozen=True)
class Gain(Interval):
    """D'/D with its interval; `low` and `high` are None without an interval, or where it has no end within reach.

    `error` is the standard error of ln(D'/D), `freedom` its degrees of freedom. `extrapolated`: D' lies outside the
    budgets that were trained.
    """

    extrapolated: bool = False

    @property
    def interval(self) -> Interval:
        """The same numbers, as results.json has them."""
        return Interval(self.value, self.count, self.error, self.low, self.high, self.freedom)


@dataclass(frozen=True)
class FittedLaw:
    """L(D) = floor + scale·D^−exponent, D in tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # results.json holds it

    floor: float
    scale: float
    exponent: float

    def loss(self, tokens: float) -> float:
        """The fitted loss after `tokens`."""
        return float(self.floor + self.scale * tokens**-self.exponent)

    def tokens(self, loss: float) -> float:
        """The tokens after which the law has this loss; infinite at its floor and below."""
        above = loss - self.floor
        return (self.scale / above) ** (1 / self.exponent) if above > 0 else math.inf


def fit_law(ladder: Mapping[float, Losses]) -> FittedLaw | None:
    """The law through the baseline's losses by tokens and seed; None with two budgets, or if no law fits."""
    if len(ladder) < MIN_BUDGETS_OF_LAW:
        return None
    curve = _PowerLaw(sorted(ladder))
    rows = _Rows.of(ladder, {})
    fitted = curve.fit(rows, np.array([rows.losses]))
    if math.isnan(fitted.theta[0, 1]):
        return None
    (level, slope), exponent = fitted.theta[0, :2], float(fitted.exponent[0])
    scale = slope / exponent
    return FittedLaw(float(level - scale), float(scale * curve.centre**exponent), exponent)


def equivalent_tokens(
    ladder: Mapping[float, Losses], ours: Losses, tokens: float, confidence: float = 0.95
) -> Gain | None:
    """The gain of runs with final losses `ours` after `tokens`, against the baseline's losses by tokens and seed.

    None if there is nothing to compare, if the baseline's loss does not fall with tokens, or if no budget within
    MAX_REACH of those trained has this loss. With one run, or two budgets, there is no interval.
    """
    if len(ladder) < 2 or not ours:
        return None
    rows = _Rows.of(ladder, ours)
    gains = _gains(rows, sorted(ladder), np.array([rows.losses]), tokens, confidence)
    value = float(gains.value[0])
    if math.isnan(value):
        return None
    outside = not min(ladder) <= value * tokens <= max(ladder)
    if len(ours) < 2 or len(ladder) < MIN_BUDGETS_OF_LAW or gains.freedom < 1:
        return Gain(value, len(ours), extrapolated=outside)
    low, high = (None if math.isnan(edge) else float(edge) for edge in (gains.low[0], gains.high[0]))
    return Gain(value, len(ours), float(gains.error[0]), low, high, float(gains.freedom), outside)


@dataclass(frozen=True)
class _Rows:
    """The runs of a regression: tokens (NaN for the variant), seed, loss."""

    tokens: Array
    seeds: Sequence[int]
    losses: Array

    @classmethod
    def of(cls, ladder: Mapping[float, Losses], ours: Losses) -> _Rows:
        rows = [(tokens, seed, loss) for tokens, runs in sorted(ladder.items()) for seed, loss in sorted(runs.items())]
        rows += [(math.nan, seed, loss) for seed, loss in sorted(ours.items())]
        tokens, seeds, losses = zip(*rows, strict=True)
        return cls(np.array(tokens), seeds, np.array(losses))

    def fixed_columns(self) -> Array:
        """The variant's own level and the seed effects, which sum to zero; [runs, columns].

        If the seeds of the two sides do not overlap, their effects cannot be told from the difference: no columns then.
        """
        ours = np.isnan(self.tokens)
        level = _indicators(ours, [True] if ours.any() else [])
        names, seeds = sorted(set(self.seeds)), np.array(self.seeds)
        effects = _indicators(seeds, names[:-1]) - (seeds == names[-1])[:, None]
        every = np.concatenate([_indicators(self.tokens, sorted(set(self.tokens[~ours]))), level, effects], 1)
        connected = np.linalg.matrix_rank(every) == every.shape[1]
        return np.concatenate([level, effects], 1) if connected else level


@dataclass(frozen=True)
class _Fitted:
    """A fit of many studies at once: parameters [studies, p], exponents [studies], residual sums, and the Jacobian."""

    theta: Array
    exponent: Array
    residual: Array
    jacobian: Array  # [studies, runs, p, and one for the exponent if there is one]

    @property
    def freedom(self) -> int:
        """Runs less parameters."""
        runs, parameters = self.jacobian.shape[1:]
        return int(runs - parameters)


class _Line:
    """L = a − c·ln(D/D₀), through two budgets."""

    def __init__(self, budgets: Sequence[float]) -> None:
        self.centre = _centre(budgets)

    def basis(self, tokens: Array, exponent: Array) -> Array:
        """[studies, places, 2]: the derivatives by a and c."""
        x = np.log(tokens / self.centre)
        return np.broadcast_to(np.stack([np.ones_like(x), -x], 1), (len(exponent), len(x), 2))

    def curvature(self, tokens: Array, theta: Array, exponent: Array) -> Array:
        """A line has no exponent: [studies, places, 0]."""
        return np.zeros((len(theta), len(tokens), 0))

    def fit(self, rows: _Rows, losses: Array) -> _Fitted:
        """Least squares; NaN where the loss does not fall."""
        exponent = np.ones(len(losses))
        design = _design(self, rows, exponent)
        theta, residual = _solve(design, losses)
        theta[theta[:, 1] <= 0] = np.nan
        return _Fitted(theta, exponent, residual, design)


class _PowerLaw:
    """L = a + c·((D/D₀)^−b − 1)/b, which is E + B·D^−b with E = a − c/b and B = (c/b)·D₀^b; D₀ centres the budgets."""

    def __init__(self, budgets: Sequence[float]) -> None:
        self.centre = _centre(budgets)

    def basis(self, tokens: Array, exponent: Array) -> Array:
        """[studies, places, 2]: the derivatives by a and c."""
        power = np.exp(-exponent[:, None] * np.log(tokens / self.centre))
        return np.stack([np.ones_like(power), (power - 1) / exponent[:, None]], 2)

    def curvature(self, tokens: Array, theta: Array, exponent: Array) -> Array:
        """[studies, places, 1]: the derivative by b."""
        b, x = exponent[:, None], np.log(tokens / self.centre)
        power = np.exp(-b * x)
        return (theta[:, 1, None] * (-x * power / b - (power - 1) / b**2))[:, :, None]

    def fit(self, rows: _Rows, losses: Array) -> _Fitted:
        """The best exponent of a grid among those with B > 0 and E ≥ 0, then Gauss-Newton steps from there."""
        designs = _design(self, rows, _EXPONENTS)  # [exponents, runs, p]
        solved = np.einsum("epn,sn->sep", np.linalg.pinv(designs), losses)
        residuals = losses[:, None] - np.einsum("enp,sep->sen", designs, solved)
        sums = (residuals**2).sum(2)
        allowed = (solved[:, :, 1] > 0) & (solved[:, :, 0] * _EXPONENTS >= solved[:, :, 1])
        sums[~allowed] = np.inf
        best = sums.argmin(1)
        exponent = _EXPONENTS[best]
        lower, upper = (np.clip(best + shift, 0, len(_EXPONENTS) - 1) for shift in (-1, 1))
        each = np.arange(len(losses))
        inner = allowed[each, lower] & allowed[each, upper]
        for _ in range(4):
            jacobian, theta = self._jacobian(rows, losses, exponent)
            step, _ = _solve(jacobian, losses - np.einsum("snp,sp->sn", jacobian[:, :, :-1], theta))
            moved = np.clip(exponent + step[:, -1], _EXPONENTS[lower], _EXPONENTS[upper])
            exponent = np.where(inner, moved, exponent)
        jacobian, theta = self._jacobian(rows, losses, exponent)
        residual = ((losses - np.einsum("snp,sp->sn", jacobian[:, :, :-1], theta)) ** 2).sum(1)
        theta[~allowed.any(1)] = np.nan
        return _Fitted(theta, exponent, residual, jacobian)

    def _jacobian(self, rows: _Rows, losses: Array, exponent: Array) -> tuple[Array, Array]:
        """The derivatives by all parameters, b last, and the parameters but b."""
        design = _design(self, rows, exponent)
        theta, _ = _solve(design, losses)
        bend = np.zeros((*design.shape[:2], 1))
        known = ~np.isnan(rows.tokens)
        bend[:, known] = self.curvature(rows.tokens[known], theta, exponent)
        return np.concatenate([design, bend], 2), theta


def _indicators(values: NDArray[Any], names: Sequence[Any]) -> Array:
    """[values, names]: 1 where a value is that name, else 0."""
    return np.asarray(values[:, None] == np.array(names, dtype=values.dtype)[None], dtype=np.float64)


def _centre(budgets: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(budget) for budget in budgets) / len(budgets))


def _design(curve: _Line | _PowerLaw, rows: _Rows, exponent: Array) -> Array:
    """[studies, runs, p]: the curve's columns (zero for the variant's runs), then the fixed ones."""
    known, fixed = ~np.isnan(rows.tokens), rows.fixed_columns()
    basis = curve.basis(rows.tokens[known], exponent)
    columns = np.zeros((len(exponent), len(rows.seeds), basis.shape[2]))
    columns[:, known] = basis
    return np.concatenate([columns, np.broadcast_to(fixed, (len(exponent), *fixed.shape))], 2)


def _solve(design: Array, losses: Array) -> tuple[Array, Array]:
    """Least squares for every study: parameters, and sums of squared residuals."""
    theta = np.einsum("spn,sn->sp", np.linalg.pinv(design), losses)
    return theta, ((losses - np.einsum("snp,sp->sn", design, theta)) ** 2).sum(1)


@dataclass(frozen=True)
class _Gains:
    """Of many studies: gains, errors of their logarithms, ends of the intervals; NaN where there is none."""

    value: Array
    error: Array
    low: Array
    high: Array
    freedom: int


def _gains(rows: _Rows, budgets: Sequence[float], losses: Array, tokens: float, confidence: float) -> _Gains:
    """Gains of studies with one design; `losses` is [studies, runs]."""
    curve = _PowerLaw(budgets) if len(budgets) >= MIN_BUDGETS_OF_LAW else _Line(budgets)
    fitted = curve.fit(rows, losses)
    logs = np.linspace(math.log(budgets[0] / MAX_REACH), math.log(budgets[-1] * MAX_REACH), _PLACES)
    basis = curve.basis(np.exp(logs), fitted.exponent)  # [studies, places, columns]
    columns = basis.shape[2]
    level = fitted.theta[:, columns, None]
    gap = np.einsum("sgc,sc->sg", basis, fitted.theta[:, :columns]) - level  # falls with tokens
    value = _last_above(logs, gap, np.full(len(losses), np.inf))
    if fitted.freedom < 1:
        nothing = np.full(len(losses), np.nan)
        return _Gains(np.exp(value) / tokens, nothing, nothing, nothing, fitted.freedom)

    # The derivatives of the gap: by the curve's parameters, the variant's level, the seeds' effects, the exponent.
    fixed = np.zeros((*gap.shape, fitted.theta.shape[1] - columns))
    fixed[:, :, 0] = -1.0
    slopes = np.concatenate([basis, fixed, curve.curvature(np.exp(logs), fitted.theta, fitted.exponent)], 2)
    covariance = np.linalg.pinv(np.einsum("snp,snq->spq", fitted.jacobian, fitted.jacobian), hermitian=True)
    covariance *= (fitted.residual / fitted.freedom)[:, None, None]
    error = np.sqrt(np.einsum("sgp,sgp->sg", np.einsum("sgp,spq->sgq", slopes, covariance), slopes))
    half = t_quantile(0.5 + confidence / 2, fitted.freedom) * error
    low, high = _last_above(logs, gap - half, value), _first_below(logs, gap + half, value)
    return _Gains(
        np.exp(value) / tokens, _at(logs, error / -np.gradient(gap, logs, axis=1), value),
        np.exp(low) / tokens, np.exp(high) / tokens, fitted.freedom,
    )  # fmt: skip


def _last_above(logs: Array, values: Array, before: Array) -> Array:
    """Where each row is last positive before a place, interpolated to its zero; NaN if never, or to the end."""
    positive = (values > 0) & (logs <= before[:, None])
    last = values.shape[1] - 1 - positive[:, ::-1].argmax(1)
    return np.where(positive.any(1) & (last < values.shape[1] - 1), _zero(logs, values, last), np.nan)


def _first_below(logs: Array, values: Array, after: Array) -> Array:
    """Where each row is first negative after a place, interpolated to its zero; NaN if never."""
    negative = (values < 0) & (logs >= after[:, None])
    first = negative.argmax(1)
    return np.where(negative.any(1) & (first > 0), _zero(logs, values, first - 1), np.nan)


def _zero(logs: Array, values: Array, left: Array) -> Array:
    """The zero of each row between the places `left` and `left + 1`."""
    each, left = np.arange(len(values)), np.clip(left, 0, len(logs) - 2)
    a, b = values[each, left], values[each, left + 1]
    share = a / np.where(a == b, 1.0, a - b)
    return np.asarray(logs[left] + np.clip(share, 0.0, 1.0) * (logs[1] - logs[0]))


def _at(logs: Array, values: Array, places: Array) -> Array:
    """The value of each row at its own place."""
    return np.array([np.interp(place, logs, row) for place, row in zip(places, values, strict=True)])
