"""Equivalent tokens: how long the baseline would have to train to reach a variant's loss (docs/compare-reference.md).

The baseline is trained at one or more sizes, at budgets D_j, each with its own full schedule. Its losses are fitted by

    L(N, D) = E_N + B·D^−b     with B > 0, b > 0, E_N ≥ 0

using least squares; all sizes share B and b, and each size has its own floor. With three or more sizes, the floors are
E_N = E + A·N^−a (`fit_law` with N for D), which gives the joint law of sizes and budgets. Gains are read at fixed N,
so they do not depend on that form. With one size and two budgets, a straight line in ln D replaces the law. A variant
trained on D tokens to a loss L_v has equivalent tokens D' with L(N, D') = L_v, and the gain D'/D.

All runs enter one regression: loss = L(N, D) + s + noise for the baseline, loss = L_v + s + noise for the variant. Each
size and budget of the variant has its own level L_v. Runs of one size and seed share their data order; their effects s
absorb it as pairing does. The interval contains every gain g that a t-test does not reject, |L(N, g·D) − L_v| ≤ t·se
(Fieller's method). The standard error is that of a fitted value at a known point, which stays accurate when the error
of a quotient does not. The interval assumes equal seed variance for variant and baseline, and for all sizes. A line
through two budgets cuts across the curve, so it has no interval.

Projection: ln gain = γ₀ + γ₁·ln C + γ₂·ln(D/N) over a variant's sizes and budgets, by least squares with the gains'
covariance from the regression; γ₂ is fitted only if tokens per parameter differ. C is the baseline's compute. If the
gains scatter around that plane by more than their errors, the error is scaled up to match (Birge's ratio).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from residua.study.statistics import Interval, t_quantile

Array = NDArray[np.float64]
Losses = Mapping[int, float]  # final loss by seed
Ladder = Mapping[float, Losses]  # the baseline's, by tokens
Cell = tuple[str, float]  # a size, and the tokens that a variant was trained on
MIN_BUDGETS_OF_LAW = 3
MAX_REACH = 4.0
"""Equivalent tokens are sought up to this multiple of the largest budget, and down to the smallest divided by it."""
MIN_RATIO_SPREAD = 1.2
"""Tokens per parameter with a smaller ratio count as equal."""
_EXPONENTS = np.geomspace(0.01, 3.0, 240)
_LINE = 1e-6  # an exponent that makes the law a line in ln D
_PLACES = 1001


@dataclass(frozen=True)
class Gain(Interval):
    """D'/D with its interval; `low` and `high` are None without an interval, or if that end is out of reach.

    `error` is the standard error of ln(D'/D), `freedom` its degrees of freedom. `extrapolated`: D' lies outside the
    budgets that were trained at this size.
    """

    extrapolated: bool = False

    @property
    def interval(self) -> Interval:
        """The same numbers, as stored in results.json."""
        return Interval(self.value, self.count, self.error, self.low, self.high, self.freedom)


@dataclass(frozen=True)
class FittedLaw:
    """L(D) = floor + scale·D^−exponent, D in tokens."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # stored in results.json

    floor: float
    scale: float
    exponent: float

    def loss(self, tokens: float) -> float:
        """The fitted loss after `tokens`."""
        return float(self.floor + self.scale * tokens**-self.exponent)

    def tokens(self, loss: float) -> float:
        """The tokens after which the law reaches this loss; infinite at or below its floor."""
        above = loss - self.floor
        return (self.scale / above) ** (1 / self.exponent) if above > 0 else math.inf


def fit_law(ladder: Ladder) -> FittedLaw | None:
    """The law through the baseline's losses by tokens and seed; None with two budgets, or if no law fits."""
    return fit_laws({"": ladder}).get("")


def fit_laws(ladders: Mapping[str, Ladder]) -> dict[str, FittedLaw]:
    """The law of each size; they differ only in their floors. Empty with too few budgets, or if no law fits."""
    rows = _Rows.of(ladders, {})
    if not rows.has_law:
        return {}
    fitted = _Regression(rows, np.array([rows.losses]))
    *levels, slope = fitted.theta[0, : len(rows.sizes) + 1]
    if math.isnan(slope):
        return {}
    exponent = float(fitted.exponent[0])
    scale = slope / exponent
    at_one = float(scale * fitted.centre**exponent)
    return {
        size: FittedLaw(float(level - scale), at_one, exponent) for size, level in zip(rows.sizes, levels, strict=True)
    }


def equivalent_tokens(ladder: Ladder, ours: Losses, tokens: float, confidence: float = 0.95) -> Gain | None:
    """The gain of runs with final losses `ours` after `tokens`, against the baseline's losses by tokens and seed.

    None if there is nothing to compare, if the baseline's loss does not fall with tokens, or if no budget within
    MAX_REACH of those trained has this loss. With one run, or two budgets, there is no interval.
    """
    if len(ladder) < 2 or not ours:
        return None
    return JointGains({"": ladder}, {("", tokens): ours}, confidence).gain(("", tokens))


class JointGains:
    """A variant at several sizes and budgets against the baseline's ladders: `ours` are its losses by size and tokens.

    `ladders` has every size of `ours`. A size may have a single budget, if others have more.
    """

    def __init__(self, ladders: Mapping[str, Ladder], ours: Mapping[Cell, Losses], confidence: float = 0.95) -> None:
        self.confidence, self._ours = confidence, {cell: losses for cell, losses in ours.items() if losses}
        self._rows = _Rows.of(ladders, self._ours)
        self._fit = _Regression(self._rows, np.array([self._rows.losses]))

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The sizes and tokens that have runs."""
        return self._rows.cells

    def gain(self, cell: Cell) -> Gain | None:
        """The gain at one size and budget; None if the law does not reach its loss. With one run, no interval."""
        ours, (size, tokens) = self._ours.get(cell), cell
        if not ours:
            return None
        gains = self._fit.gains(self._rows.cells.index(cell), self.confidence)
        value, budgets = float(gains.value[0]), self._rows.budgets[size]
        if math.isnan(value):
            return None
        outside = not budgets[0] <= value * tokens <= budgets[-1]
        if len(ours) < 2 or not self._rows.has_law or self._fit.freedom < 1:
            return Gain(value, len(ours), extrapolated=outside)
        low, high = (None if math.isnan(edge) else float(edge) for edge in (gains.low[0], gains.high[0]))
        return Gain(value, len(ours), float(gains.error[0]), low, high, float(self._fit.freedom), outside)

    def project(
        self, points: Mapping[Cell, tuple[float, float]], to: tuple[float, float]
    ) -> tuple[Interval, Interval] | None:
        """The gain projected to compute and tokens per parameter `to`; `points` has both for every cell.

        The second interval is the factor by which the gain changes per tenfold compute. None with one size, one run per
        cell or no degrees of freedom, or if a gain is unknown.
        """
        cells = [cell for cell in self._rows.cells if cell in points]
        repeated = any(len(losses) > 1 for losses in self._ours.values())
        if len({size for size, _ in cells}) < 2 or not self._rows.has_law or self._fit.freedom < 1 or not repeated:
            return None
        projection = self._fit.project(
            [self._rows.cells.index(cell) for cell in cells], [points[cell] for cell in cells], to
        )
        if any(math.isnan(float(part[0])) for part in projection):
            return None
        value, error, slope, slope_error = (float(part[0]) for part in projection)
        count = min(len(self._ours[cell]) for cell in cells)
        half = t_quantile(0.5 + self.confidence / 2, self._fit.freedom)

        def around(middle: float, wide: float) -> Interval:
            low, high = math.exp(middle - half * wide), math.exp(middle + half * wide)
            return Interval(math.exp(middle), count, wide, low, high, float(self._fit.freedom))

        return around(value, error), around(slope * math.log(10), slope_error * math.log(10))


@dataclass(frozen=True)
class _Rows:
    """The runs of a regression: index of size and of cell (−1 for the baseline), tokens, seed, loss."""

    sizes: tuple[str, ...]
    cells: tuple[Cell, ...]
    size: NDArray[np.int64]
    cell: NDArray[np.int64]
    tokens: Array
    seeds: Sequence[int]
    losses: Array

    @classmethod
    def of(cls, ladders: Mapping[str, Ladder], ours: Mapping[Cell, Losses]) -> _Rows:
        sizes, cells = tuple(ladders), tuple(ours)
        rows = [
            (sizes.index(size), -1, tokens, seed, loss)
            for size, ladder in ladders.items()
            for tokens, runs in sorted(ladder.items())
            for seed, loss in sorted(runs.items())
        ]
        rows += [
            (sizes.index(size), number, tokens, seed, loss)
            for number, (size, tokens) in enumerate(cells)
            for seed, loss in sorted(ours[size, tokens].items())
        ]
        size, cell, tokens, seeds, losses = zip(*rows, strict=True)
        return cls(sizes, cells, np.array(size), np.array(cell), np.array(tokens), seeds, np.array(losses))

    @cached_property
    def budgets(self) -> dict[str, list[float]]:
        """By size, the tokens of the baseline's runs, ascending."""
        return {
            name: sorted(set(self.tokens[(self.size == number) & self.known].tolist()))
            for number, name in enumerate(self.sizes)
        }

    @property
    def known(self) -> NDArray[np.bool_]:
        """Mask of the baseline's runs."""
        return self.cell < 0

    @property
    def has_law(self) -> bool:
        """Whether there are enough budgets to fit a floor for each size, a scale and an exponent."""
        return sum(map(len, self.budgets.values())) >= len(self.sizes) + MIN_BUDGETS_OF_LAW - 1

    @cached_property
    def fixed_columns(self) -> Array:
        """The variant's levels, and the effects of seeds at each size, which sum to zero; [runs, columns].

        If the two sides share no seeds, seed effects cannot be separated from the difference: then there are no
        columns.
        """
        columns, seeds = [_indicators(self.cell, range(len(self.cells)))], np.array(self.seeds)
        for number in range(len(self.sizes)):
            here = self.size == number
            names = sorted(set(seeds[here].tolist()))
            effects = (_indicators(seeds, names[:-1]) - (seeds == names[-1])[:, None]) * here[:, None]
            levels = np.unique(np.stack([self.cell, self.tokens], 1)[here], axis=0, return_inverse=True)[1].ravel()
            every = np.concatenate([_indicators(levels, range(levels.max() + 1)), effects[here]], 1)
            if np.linalg.matrix_rank(every) == every.shape[1]:
                columns.append(effects)
        return np.concatenate(columns, 1)


class _Regression:
    """Many studies with one design, fitted at once: `losses` is [studies, runs].

    The law is L = a + c·((D/D₀)^−b − 1)/b, which is E + B·D^−b with E = a − c/b and B = (c/b)·D₀^b; D₀ centres the
    budgets. With two budgets it is the line L = a − c·ln(D/D₀), its limit for b → 0. `theta` [studies, p] holds the
    levels of sizes, the slope c, the levels of cells and the effects of seeds; `exponent` is b.
    """

    def __init__(self, rows: _Rows, losses: Array) -> None:
        self.rows = rows
        budgets = [tokens for of_size in rows.budgets.values() for tokens in of_size]
        self.centre = math.exp(math.fsum(map(math.log, budgets)) / len(budgets))
        self.theta, self.exponent = self._fitted(losses)
        design = self._design(self.exponent)
        left = losses - np.einsum("snp,sp->sn", design, self.theta)
        jacobian = self._jacobian(design, self.theta, self.exponent) if rows.has_law else design
        self.freedom: int = jacobian.shape[1] - jacobian.shape[2]
        normal = np.nan_to_num(np.einsum("snp,snq->spq", jacobian, jacobian))
        noise = (left**2).sum(1) / max(self.freedom, 1)
        self.covariance = np.linalg.pinv(normal, hermitian=True) * noise[:, None, None]

    def _shape(self, tokens: Array, exponent: Array) -> Array:
        """[studies, places]: the derivative with respect to c."""
        power = np.exp(-exponent[:, None] * np.log(tokens / self.centre))
        return np.asarray((power - 1) / exponent[:, None])

    def _bend(self, tokens: Array, slope: Array, exponent: Array) -> Array:
        """[studies, places]: the derivative with respect to b."""
        b, x = exponent[:, None], np.log(tokens / self.centre)
        power = np.exp(-b * x)
        return np.asarray(slope[:, None] * (-x * power / b - (power - 1) / b**2))

    def _design(self, exponent: Array) -> Array:
        """[studies, runs, p]: levels of sizes and the curve (zero for the variant's runs), then the fixed columns."""
        rows, known = self.rows, self.rows.known[:, None]
        levels = np.concatenate([_indicators(rows.size, range(len(rows.sizes))) * known, rows.fixed_columns], 1)
        shared = np.broadcast_to(levels, (len(exponent), *levels.shape))
        return np.insert(shared, len(rows.sizes), self._shape(rows.tokens, exponent) * known[:, 0], axis=2)

    def _jacobian(self, design: Array, theta: Array, exponent: Array) -> Array:
        """The derivatives with respect to all parameters, the exponent last."""
        bend = self._bend(self.rows.tokens, theta[:, len(self.rows.sizes)], exponent) * self.rows.known
        return np.concatenate([design, bend[:, :, None]], 2)

    def _fitted(self, losses: Array) -> tuple[Array, Array]:
        """The best exponent of a grid among those with B > 0 and E ≥ 0, then Gauss-Newton steps from there."""
        sizes = len(self.rows.sizes)
        if not self.rows.has_law:
            exponent = np.full(len(losses), _LINE)
            theta = _solve(self._design(exponent), losses)
            theta[theta[:, sizes] <= 0] = np.nan  # the loss does not fall
            return theta, exponent
        designs = self._design(_EXPONENTS)  # [exponents, runs, p]
        solved = np.einsum("epn,sn->sep", np.linalg.pinv(designs), losses)
        sums = ((losses[:, None] - np.einsum("enp,sep->sen", designs, solved)) ** 2).sum(2)
        slope, lowest = solved[:, :, sizes], solved[:, :, :sizes].min(2)
        allowed = (slope > 0) & (lowest * _EXPONENTS >= slope)
        sums[~allowed] = np.inf
        best = sums.argmin(1)
        exponent = _EXPONENTS[best]
        lower, upper = (np.clip(best + shift, 0, len(_EXPONENTS) - 1) for shift in (-1, 1))
        each = np.arange(len(losses))
        inner = allowed[each, lower] & allowed[each, upper]
        for _ in range(4):
            design = self._design(exponent)
            theta = _solve(design, losses)
            jacobian = self._jacobian(design, theta, exponent)
            step = _solve(jacobian, losses - np.einsum("snp,sp->sn", design, theta))
            moved = np.clip(exponent + step[:, -1], _EXPONENTS[lower], _EXPONENTS[upper])
            exponent = np.where(inner, moved, exponent)
        theta = _solve(self._design(exponent), losses)
        theta[~allowed.any(1)] = np.nan
        return theta, exponent

    def _slopes(self, number: int, tokens: Array) -> Array:
        """The derivatives of L(N, D) − L_v of a cell with respect to all parameters: [studies, places, p]."""
        sizes = len(self.rows.sizes)
        parameters = self.covariance.shape[1]
        slopes = np.zeros((len(self.theta), tokens.shape[-1], parameters))
        slopes[:, :, self.rows.sizes.index(self.rows.cells[number][0])] = 1.0
        slopes[:, :, sizes] = self._shape(tokens, self.exponent)
        slopes[:, :, sizes + 1 + number] = -1.0
        if self.rows.has_law:
            slopes[:, :, -1] = self._bend(tokens, self.theta[:, sizes], self.exponent)
        return slopes

    def _gap(self, number: int, tokens: Array) -> Array:
        """L(N, D) − L_v of a cell, which falls with tokens: [studies, places]."""
        slopes = self._slopes(number, tokens)[:, :, : self.theta.shape[1]]
        return np.asarray(np.einsum("sgp,sp->sg", slopes, self.theta))

    def _places(self, number: int) -> Array:
        budgets = self.rows.budgets[self.rows.cells[number][0]]
        return np.linspace(math.log(budgets[0] / MAX_REACH), math.log(budgets[-1] * MAX_REACH), _PLACES)

    def gains(self, number: int, confidence: float) -> _Gains:
        """The gains of a cell, with intervals if the regression has degrees of freedom left."""
        logs, tokens = self._places(number), self.rows.cells[number][1]
        gap = self._gap(number, np.exp(logs))
        value = _last_above(logs, gap, np.full(len(gap), np.inf))
        if self.freedom < 1:
            nothing = np.full(len(gap), np.nan)
            return _Gains(np.exp(value) / tokens, nothing, nothing, nothing)
        slopes = self._slopes(number, np.exp(logs))
        error = np.sqrt(np.einsum("sgp,sgp->sg", np.einsum("sgp,spq->sgq", slopes, self.covariance), slopes))
        half = t_quantile(0.5 + confidence / 2, self.freedom) * error
        low, high = _last_above(logs, gap - half, value), _first_below(logs, gap + half, value)
        return _Gains(
            np.exp(value) / tokens, _at(logs, error / -np.gradient(gap, logs, axis=1), value),
            np.exp(low) / tokens, np.exp(high) / tokens,
        )  # fmt: skip

    def project(
        self, numbers: Sequence[int], points: Sequence[tuple[float, float]], to: tuple[float, float]
    ) -> tuple[Array, Array, Array, Array]:
        """ln gain at `to` and its error, and the trend γ₁ and its error; `points` are compute and tokens per parameter.

        NaN if the law does not reach a loss.
        """
        logs, slopes = [], []
        for number in numbers:
            places = self._places(number)
            value = _last_above(places, self._gap(number, np.exp(places)), np.full(len(self.theta), np.inf))
            fall = self.theta[:, len(self.rows.sizes)] * np.exp(-self.exponent * (value - math.log(self.centre)))
            slopes.append(self._slopes(number, np.exp(value)[:, None])[:, 0] / fall[:, None])
            logs.append(value - math.log(self.rows.cells[number][1]))
        y, gradient = np.stack(logs, 1), np.nan_to_num(np.stack(slopes, 1))
        compute, ratio = (np.log(np.array(column)) for column in zip(*points, strict=True))
        features = [np.ones(len(numbers)), compute - math.log(to[0])]
        if ratio.max() - ratio.min() > math.log(MIN_RATIO_SPREAD):
            features.append(ratio - math.log(to[1]))
        x = np.stack(features, 1)
        weight = np.linalg.pinv(np.einsum("smp,spq,snq->smn", gradient, self.covariance, gradient), hermitian=True)
        spread = np.linalg.pinv(np.einsum("mr,smn,nq->srq", x, weight, x), hermitian=True)
        gamma = np.einsum("srq,nq,smn,sm->sr", spread, x, weight, y)
        left = y - gamma @ x.T
        free = len(numbers) - x.shape[1]
        birge = np.einsum("sm,smn,sn->s", left, weight, left) / max(free, 1) if free else np.ones(len(y))
        error = np.sqrt(np.maximum(birge, 1.0)[:, None] * np.einsum("srr->sr", spread))
        return gamma[:, 0], error[:, 0], gamma[:, 1], error[:, 1]


def _indicators(values: NDArray[Any], names: Sequence[Any]) -> Array:
    """[values, names]: 1 where a value equals the name, else 0."""
    return np.asarray(values[:, None] == np.array(names, dtype=values.dtype)[None], dtype=np.float64)


def _solve(design: Array, losses: Array) -> Array:
    """The least-squares parameters of every study."""
    return np.asarray(np.einsum("spn,sn->sp", np.linalg.pinv(np.nan_to_num(design)), losses))


@dataclass(frozen=True)
class _Gains:
    """For many studies: gains, errors of their logarithms, ends of the intervals; NaN if missing."""

    value: Array
    error: Array
    low: Array
    high: Array


def _last_above(logs: Array, values: Array, before: Array) -> Array:
    """Where each row is last positive before a point, interpolated to its zero; NaN if never, or up to the end."""
    positive = (values > 0) & (logs <= before[:, None])
    last = values.shape[1] - 1 - positive[:, ::-1].argmax(1)
    return np.where(positive.any(1) & (last < values.shape[1] - 1), _zero(logs, values, last), np.nan)


def _first_below(logs: Array, values: Array, after: Array) -> Array:
    """Where each row is first negative after a point, interpolated to its zero; NaN if never."""
    negative = (values < 0) & (logs >= after[:, None])
    first = negative.argmax(1)
    return np.where(negative.any(1) & (first > 0), _zero(logs, values, first - 1), np.nan)


def _zero(logs: Array, values: Array, left: Array) -> Array:
    """The zero of each row between the indices `left` and `left + 1`."""
    each, left = np.arange(len(values)), np.clip(left, 0, len(logs) - 2)
    a, b = values[each, left], values[each, left + 1]
    share = a / np.where(a == b, 1.0, a - b)
    return np.asarray(logs[left] + np.clip(share, 0.0, 1.0) * (logs[1] - logs[0]))


def _at(logs: Array, values: Array, places: Array) -> Array:
    """The value of each row at its own index."""
    return np.array([np.interp(place, logs, row) for place, row in zip(places, values, strict=True)])
