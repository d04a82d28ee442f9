"""Norm weights: the factors that each norm gives its dimensions, norm by norm, and those furthest from 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Model, Models, Sentence
from residua.diagnose.plots import LABELS, add_tabs, by_layer
from residua.report import Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN = 48


class NormFacts(Frozen):
    """One factor of the norm before a sublayer (the last: of the final norm): λ after the division by the RMS, λ1
    before it (PreAffine). `dimensions` are those in which this factor is smallest and largest in any norm, the same for
    all norms, and `values` the factors there."""

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
        names = list(dict.fromkeys(name for own in parts.values() for name in own))
        found = []
        for name in names:
            own = {k: factors[name].double().cpu() for k, factors in sorted(parts.items()) if name in factors}
            dimensions = _furthest(torch.stack(list(own.values())))
            found += [self._facts(k, name, factor, dimensions) for k, factor in own.items()]
        return NormKeys(norms=found)

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
        told = [_told(model, factor) for factor in dict.fromkeys(n.factor for n in model.norms)]
        if told:
            yield Sentence(82, f"Norm weights furthest from 1: {'; '.join(told)}.")

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        if not any(m.norms for m in models):
            return
        section = page.section(
            "Norm weights",
            "λ multiplies what a norm returns, λ1 of PreAffine what it reads. Healthy: near 1 everywhere. A dimension "
            "with a tiny λ in every norm is a residual sink that is shut out again; with a large λ1 and a small λ, "
            "PreAffine rescales by a parameter instead of an outlier.",
        )
        factors = dict.fromkeys(n.factor for m in models for n in m.norms)
        ends = {"lowest": "smallest", "median": "median", "highest": "largest"}
        views = {
            f"{title} {factor}": by_layer(
                models, _points(factor, key), f"{title} {factor}", floor=_ones(factor), floor_name="1", x="norm before"
            )
            for factor in factors
            for key, title in ends.items()
        }
        add_tabs(section, views)
        section.subheading("The dimensions furthest from 1")
        section.tabs(
            _maps(models),
            "One row for each norm: the dimensions with the smallest factor of any norm, then those with the largest.",
        )


def _furthest(factors: Tensor) -> list[int]:
    """The dimensions with the smallest and with the largest factors of any norm, half of them each; [norms, C]."""
    low = factors.amin(0).argsort(stable=True)[: SHOWN // 2].tolist()
    high = factors.amax(0).argsort(descending=True, stable=True)[: SHOWN // 2].tolist()
    return list(dict.fromkeys([*low, *high]))


def _far(factor: float) -> float:
    """How many times larger or smaller than 1."""
    size = max(abs(factor), 1e-12)
    return max(size, 1 / size)


def _told(model: Model, factor: str) -> str:
    """`λ1 = 7.19 in dimension 1326 before layer 3 attention, where λ is 0.06`."""
    own = [n for n in model.norms if n.factor == factor]
    most = max(own, key=lambda n: max(map(_far, n.values)))
    value = max(most.values, key=_far)
    dimension = most.dimensions[most.values.index(value)]
    others = [
        f"{n.factor} is {n.values[n.dimensions.index(dimension)]:.3g}"
        for n in model.norms
        if n.state == most.state and n.factor != factor and dimension in n.dimensions
    ]
    where = f", where {' and '.join(others)}" if others else ""
    return f"{factor} = {value:.3g} in dimension {dimension} before {most.name}{where}"


def _points(factor: str, key: str) -> Callable[[Model], list[tuple[float, float]]]:
    return lambda m: [(n.state, getattr(n, key)) for n in m.norms if n.factor == factor]


def _ones(factor: str) -> Callable[[Model], list[tuple[float, float]]]:
    return lambda m: [(n.state, 1.0) for n in m.norms if n.factor == factor]


def _maps(models: Models) -> dict[str, Figure]:
    """Norm × dimension, by factor."""
    found = {}
    for m in models:
        for factor in dict.fromkeys(n.factor for n in m.norms):
            own = [n for n in m.norms if n.factor == factor]
            names = [str(dimension) for dimension in own[0].dimensions]
            rows = [[float(f"{value:.4g}") for value in n.values] for n in own]
            high = max(1.0, *(max(row) for row in rows))
            low = min(0.0, *(min(row) for row in rows))
            label = factor if len(models) == 1 else f"{m.name}: {factor}"
            found[label] = heatmap(
                rows, names, [n.name for n in own], "dimension", "norm before", factor, bounds=(low, high),
                height=min(190 + 18 * len(rows), 760),
                step=(-(-len(names) // (2 * LABELS)), -(-len(rows) // (2 * LABELS))),
            )  # fmt: skip
    return found
