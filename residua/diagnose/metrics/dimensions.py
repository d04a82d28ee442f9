"""Residual sinks (dimensions that are large in nearly every token), and the weights that norms give to dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Explained, Finding, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation
from residua.diagnose.plots import (
    LABELS,
    NONE,
    Part,
    Table,
    Topic,
    by_layer,
    colours,
    label_step,
    line,
    owners,
    tabs_each,
)
from residua.diagnose.sentences import listed, percent, short, sureness
from residua.model.gauges import relative_sizes
from residua.ops._runtime.numeric import wide
from residua.report import Cell, Column
from residua.report.figures import Curve, Figure, curves, heatmap

FAR = 8.0
"""A value is far above the rest if it exceeds its token's median |h| this many times. For normal values of equal scale,
this happens once in 15 million."""
MOST_TOKENS = 0.5
LISTED_DIMENSIONS = 64


class DimensionFacts(Frozen):
    """One dimension of the states: mean |h|, its ratio to the median dimension's, the share of tokens in which it is
    far above the token's median, and the mean |gain| that the norms give it."""

    dimension: int
    mean: float
    ratio: float
    share: float
    gain: float | None = None


class DimensionProfile(Frozen):
    """The largest dimensions by mean |h| over tokens and states, and the median for comparison."""

    median: float
    median_gain: float | None
    largest: list[DimensionFacts]


class DimensionKeys(Frozen):
    """All states together."""

    dimensions: DimensionProfile


class Dimensions(Metric):
    """Mean |h| of each dimension over tokens and states, and the share of tokens in which it exceeds FAR medians."""

    keys = DimensionKeys
    kinds = ("residual_sink",)
    defect = "residual sink"
    columns = (Column("largest dimension", "mean |h| of the largest dimension over the median dimension's"),)
    file_place, page_place = 40, 30

    def add(self, observation: Observation) -> None:
        for k, state in observation.states.items():
            size = wide(state).abs()
            far = size > FAR * observation.median(k)[..., None]
            both = torch.stack([size.double().sum((0, 1)), far.double().sum((0, 1))])
            self.means[k].add(both, observation.tokens.numel())

    def facts(self) -> DimensionKeys:
        states = [mean for _, mean in sorted(self.means.items())]
        mean, share = torch.stack([m.sum for m in states]).sum(0).div(sum(m.count for m in states)).cpu()
        gains = [gain.double().abs().cpu() for gain in self.subject.gains.values()]
        gain = torch.stack(gains).mean(0) if gains else None
        median, ratio = max(float(mean.median()), 1e-30), relative_sizes(mean)
        largest = [
            DimensionFacts(
                dimension=j,
                mean=float(mean[j]),
                ratio=float(ratio[j]),
                share=float(share[j]),
                gain=None if gain is None else float(gain[j]),
            )
            for j in mean.argsort(descending=True)[:LISTED_DIMENSIONS].tolist()
        ]
        median_gain = None if gain is None else float(gain.median())
        return DimensionKeys(dimensions=DimensionProfile(median=median, median_gain=median_gain, largest=largest))

    def findings(self, model: Model) -> list[Finding]:
        """Report dimensions that exceed FAR medians in most tokens."""
        profile = model.dimensions
        return [
            Finding(
                kind="residual_sink",
                where={"dimension": d.dimension},
                words=f"dimension {d.dimension} is a residual sink: {d.ratio:.3g}× the median, far above it in "
                f"{percent(d.share)} of tokens"
                + ("" if d.gain is None else f", norm gain {d.gain:.2g} (median {profile.median_gain or 0:.2g})"),
            )
            for d in profile.largest
            if d.share >= MOST_TOKENS and d.ratio >= FAR
        ]

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        numbers = [d for f in findings if isinstance(d := f.where["dimension"], int)]
        least = min(
            (d for d in model.dimensions.largest if d.dimension in numbers), key=lambda d: d.ratio, default=None
        )
        if least is None:
            return super().explain(model, findings)
        return Explained(
            f"{listed('dimension', numbers)} of {model.width}, over all states",
            sureness(
                f"{short(least.ratio)}× the median (threshold {FAR:g}×) in {percent(least.share)} of tokens "
                f"(threshold {percent(MOST_TOKENS)})",
                least.ratio / FAR,
                model,
            ),
            "Quantize with SmoothQuant (residua quantize --smooth 0.5), which folds such scales into the "
            "weights. To avoid it, train with another norm (model.norm.kind=preaffine or gatednorm).",
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        largest = model.dimensions.largest[0]
        state = max(model.states, key=lambda s: s.largest[0].value)
        yield Sentence(
            80,
            f"The largest dimension, {largest.dimension}, is {largest.ratio:.3g}× the median; the largest single value "
            f"is {state.largest[0].value:.4g}, before {state.name}.",
        )

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        return [f"{model.dimensions.largest[0].ratio:.3g}×"]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        columns = [
            Column("dimension"),
            Column("× median", "mean |h| over that of the median dimension"),
            Column("far above in", "share of tokens where it exceeds 8 times the token's median |h|"),
            Column("norm gain", "mean |gain| over all norms, and the median dimension's"),
        ]
        rows: list[list[Cell]] = [
            [owner, str(d.dimension), f"{d.ratio:.3g}", percent(d.share), _gain(d.gain, m.dimensions.median_gain)]
            for m, owner in zip(models, owners(models), strict=True)
            for d in m.dimensions.largest[: 5 if len(models) == 1 else 3]
        ]
        yield Topic(
            "Residual sinks",
            "Dimensions that are large in nearly every token. Healthy: a flat line near 1. A few dimensions "
            "far above the rest, with a small norm gain that undoes them, rescale all others and make the model "
            "hard to quantize.",
            Part(_sizes(models), "Mean |h| over tokens and sublayers, the largest dimensions first."),
            Part(
                _gains(models),
                "Healthy: a cloud. Points at the lower right are sinks that the norm suppresses.",
            ),
            Part(Table(columns, rows)),
        )


def _sizes(models: Models) -> Figure:
    """Mean |h| of the largest dimensions, sorted, in medians."""
    series = [
        line(m.name, [(rank + 1, d.ratio) for rank, d in enumerate(m.dimensions.largest)], colour)
        for m, colour in zip(models, colours(models), strict=True)
    ]
    return curves(series, "dimensions, largest first", "mean |h| / median dimension's", log_y=True, height=340)


def _gains(models: Models) -> Figure | None:
    """Norm gain against size, one point for each of the largest dimensions."""
    series = []
    for m, colour in zip(models, colours(models), strict=True):
        known = sorted((d.ratio, d.gain) for d in m.dimensions.largest if d.gain is not None)
        if known:
            x, y = [ratio for ratio, _ in known], [max(gain, 1e-6) for _, gain in known]
            series.append(Curve(m.name, x, y, colour, markers=True, lines=False))
    if not series:
        return None
    return curves(series, "mean |h| / median dimension's", "mean |norm gain|", log_x=True, log_y=True, height=340)


def _gain(gain: float | None, median: float | None) -> str:
    return NONE if gain is None or median is None else f"{gain:.3g} ({median:.3g})"


MAPPED_DIMENSIONS = 48


class NormFacts(Frozen):
    """One factor of the norm before a sublayer (the last entry: the final norm's): λ after the division by the RMS, λ1
    before it (PreAffine). `dimensions` are those in which any norm has its smallest or largest such factors; they are
    the same for all norms. `values` are the factors there."""

    state: int
    name: str
    factor: str
    lowest: float
    median: float
    highest: float
    dimensions: list[int]
    values: list[float]


class NormKeys(Frozen):
    """Every factor of every norm."""

    norms: list[NormFacts] = Field(default_factory=list)


class Norms(Metric):
    """Factors are parameters, so there is nothing to sum over tokens."""

    keys = NormKeys
    file_place, page_place = 45, 35

    def facts(self) -> NormKeys:
        parts = self.subject.norm_parts()
        names = list(dict.fromkeys(name for by_site in parts.values() for name in by_site))
        facts = []
        for name in names:
            by_site = {k: factors[name].double().cpu() for k, factors in sorted(parts.items()) if name in factors}
            dimensions = _furthest(torch.stack(list(by_site.values())))
            facts += [self._facts(k, name, factor, dimensions) for k, factor in by_site.items()]
        return NormKeys(norms=facts)

    def _facts(self, state: int, name: str, factor: Tensor, dimensions: list[int]) -> NormFacts:
        return NormFacts(
            state=state,
            name=self.subject.reader_name(state),
            factor=name,
            lowest=float(factor.min()),
            median=float(factor.median()),
            highest=float(factor.max()),
            dimensions=dimensions,
            values=factor[dimensions].tolist(),
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        words = [_furthest_words(model, factor) for factor in dict.fromkeys(n.factor for n in model.norms)]
        if words:
            yield Sentence(82, f"Norm weights furthest from 1: {'; '.join(words)}.")

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        factors = dict.fromkeys(n.factor for m in models for n in m.norms)
        yield Topic(
            "Norm weights",
            "λ multiplies the output of a norm, λ1 of PreAffine its input. Healthy: near 1 everywhere. A "
            "dimension with a tiny λ in every norm is a residual sink that the norms suppress; with a large λ1 and "
            "a small λ, PreAffine rescales by a parameter instead of an outlier.",
            Part({title: curve for factor in factors for title, curve in _extents(models, factor).items()}),
            Part(
                tabs_each(models, _factor_maps),
                "One row per norm: the dimensions with the smallest factors of any norm, then those with the largest.",
                "The dimensions furthest from 1",
            ),
        )


def _furthest(factors: Tensor) -> list[int]:
    """Return the dimensions with the smallest, then those with the largest factors in any norm; `factors` [norms,
    C]."""
    low = factors.amin(0).argsort(stable=True)[: MAPPED_DIMENSIONS // 2].tolist()
    high = factors.amax(0).argsort(descending=True, stable=True)[: MAPPED_DIMENSIONS // 2].tolist()
    return list(dict.fromkeys([*low, *high]))


def _far(factor: float) -> float:
    """How many times a factor is larger or smaller than 1."""
    size = max(abs(factor), 1e-12)
    return max(size, 1 / size)


def _furthest_words(model: Model, factor: str) -> str:
    """`λ1 = 7.19 in dimension 1326 before layer 3 attention, where λ is 0.06`."""
    norms = [n for n in model.norms if n.factor == factor]
    most = max(norms, key=lambda n: max(map(_far, n.values)))
    value = max(most.values, key=_far)
    dimension = most.dimensions[most.values.index(value)]
    others = [
        f"{n.factor} is {n.values[n.dimensions.index(dimension)]:.3g}"
        for n in model.norms
        if n.state == most.state and n.factor != factor and dimension in n.dimensions
    ]
    where = f", where {' and '.join(others)}" if others else ""
    return f"{factor} = {value:.3g} in dimension {dimension} before {most.name}{where}"


def _extents(models: Models, factor: str) -> dict[str, Figure | None]:
    """Norm by norm, the smallest, the median and the largest value of a factor."""

    def curve(title: str, value: str) -> Figure | None:
        return by_layer(
            models, lambda m: [(n.state, getattr(n, value)) for n in m.norms if n.factor == factor], title,
            floor=lambda m: [(n.state, 1.0) for n in m.norms if n.factor == factor], floor_name="1", x="norm before",
        )  # fmt: skip

    titles = {f"smallest {factor}": "lowest", f"median {factor}": "median", f"largest {factor}": "highest"}
    return {title: curve(title, value) for title, value in titles.items()}


def _factor_maps(model: Model) -> dict[str, Figure]:
    """Norm × dimension, by factor."""
    maps = {}
    for factor in dict.fromkeys(n.factor for n in model.norms):
        norms = [n for n in model.norms if n.factor == factor]
        names = [str(dimension) for dimension in norms[0].dimensions]
        rows = [[float(f"{value:.4g}") for value in n.values] for n in norms]
        bounds = min(0.0, *(min(row) for row in rows)), max(1.0, *(max(row) for row in rows))
        maps[factor] = heatmap(
            rows, names, [n.name for n in norms], "dimension", "norm before", factor, bounds=bounds,
            height=min(190 + 18 * len(rows), 760),
            step=(label_step(len(names), 2 * LABELS), label_step(len(rows), 2 * LABELS)),
        )  # fmt: skip
    return maps
