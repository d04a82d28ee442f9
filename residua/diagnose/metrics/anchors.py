"""Anchor mixing: how much each projection takes from the first layer's, its anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Models
from residua.report import Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class AnchorFacts(Frozen):
    """λ of projection mixing: means by head of λ1 (anchor) and λ2 (current), and the share of |λ1| below 1e-3."""

    layer: int
    pathway: str
    anchor: list[float]
    current: list[float]
    near_zero: float


class AnchorKeys(Frozen):
    """Every layer and pathway (q, k, v, g) that mixes in an anchor."""

    anchors: list[AnchorFacts] = Field(default_factory=list)


class Anchors(Metric):
    """λ are parameters, so there is nothing to sum over tokens."""

    keys = AnchorKeys
    file_place, page_place = 100, 110

    def facts(self) -> AnchorKeys:
        return AnchorKeys(anchors=[AnchorFacts(**vars(scales)) for scales in self.subject.anchor_scales()])

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        maps = _maps(models)
        if maps:
            page.section(
                "Anchor mixing",
                "λ1 weighs the anchor, λ2 the layer's own projection. Healthy: λ1 differs between pathways and layers; "
                "λ1 near zero everywhere is an anchor the model does not use.",
            ).tabs(maps)


def _maps(models: Models) -> dict[str, Figure]:
    """λ1 and λ2, pathway × layer, and by head where λ has heads."""
    titles = {"anchor": "λ1 (anchor)", "current": "λ2 (current)", "near_zero": "share |λ1| < 1e-3"}
    return {
        title if len(models) == 1 else f"{m.name}: {title}": _map(m.anchors, key, title)
        for m in models
        if m.anchors
        for key, title in titles.items()
    }


def _map(facts: Sequence[AnchorFacts], key: str, title: str) -> Figure:
    layers = sorted({a.layer for a in facts})
    columns: dict[str, dict[int, float]] = {}
    for a in facts:
        value = getattr(a, key)
        values = value if isinstance(value, list) else [value]
        for head, x in enumerate(values):
            column = f"{a.pathway.upper()}" if len(values) == 1 else f"{a.pathway.upper()} {head}"
            columns.setdefault(column, {})[a.layer] = x
    rows = [[column.get(layer) for column in columns.values()] for layer in layers]
    return heatmap(rows, list(columns), [str(layer) for layer in layers], "pathway and head", "layer", title)
