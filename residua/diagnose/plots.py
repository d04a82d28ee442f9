"""What the metrics' figures share: one line per model in every curve, one tab per model in every heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from residua.diagnose.metric import Model, Models
from residua.report import Section, Series, theme
from residua.report.figures import Curve, curves, heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Points = list[tuple[float, float]]
Select = Callable[[Model], Points]
NONE = "—"
LABELS = 12
"""An axis names at most this many layers."""


def places(models: Models) -> list[int]:
    """The place of each model, which decides its colour and its marker: that in the study if all come from one."""
    known = [model.place for model in models]
    return list(range(1, len(models) + 1)) if None in known or len(set(known)) < len(known) else known


def colours(models: Models) -> list[str]:
    """The colour of each model, the same in every figure of the page, and as on the page of the study it belongs to."""
    return [theme.colour(place) for place in places(models)]


def owners(models: Models) -> list[Series]:
    """The models as cells of a table, each with its colour."""
    return [Series(model.name, colour) for model, colour in zip(models, colours(models), strict=True)]


def by_layer(
    models: Models,
    points: Select,
    y: str,
    *,
    floor: Select | None = None,
    floor_name: str = "uniform attention",
    log: bool = False,
    x: str = "layer",
    bounds: tuple[float, float] | None = None,
) -> Figure | None:
    """A quantity over depth, one line per model; None if no model has it. Models without it keep their colour.

    `floor` is a reference to compare with, drawn dotted: once if all models share it, else once per model. Unless `x`
    is "layer", points are numbered by sublayer; the axis then names layers, and the pointer shows sublayers.
    """
    series, drawn = [], []
    floors = [] if floor is None else [found for model in models if (found := floor(model))]
    shared = bool(floors) and all(other == floors[0] for other in floors)
    if shared:
        series.append(line(floor_name, floors[0], theme.colour(0), dash="dot"))
        drawn.append(models[0])
    for model, place in zip(models, places(models), strict=True):
        found, colour = points(model), theme.colour(place)
        if found:
            series.append(line(model.name, found, colour, symbol=theme.symbol(place)))
            drawn.append(model)
            if floor is not None and not shared:
                series.append(line(f"{model.name}, {floor_name}", floor(model), colour, dash="dot"))
                drawn.append(model)
    if not series:
        return None
    if x == "layer":
        axis = {"unifiedhovertitle": {"text": "layer %{x}"}}
        return curves(series, x, y, log_y=log, whole_x=True, y_range=bounds, height=340, x_axis=axis)
    return over_sublayers(series, drawn, x, y, log_y=log, y_range=bounds, height=340)


def over_sublayers(series: Sequence[Curve], models: Models, x: str, y: str, **settings: Any) -> Figure:
    """Curves whose axis names layers and whose pointer names sublayers; curve i is one of model i."""
    deepest = max(models, key=lambda model: len(model.sites))
    starts = [
        site.index for site in deepest.sites if site.index == 0 or deepest.sites[site.index - 1].layer != site.layer
    ]
    shown = starts[:: max(1, -(-len(starts) // LABELS))]
    axis = {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [f"layer {deepest.sites[k].layer}" for k in shown],
        "unifiedhovertitle": {"text": "%{customdata}"},
    }
    figure = curves(series, x, y, whole_x=True, x_axis=axis, **settings)
    for trace, owner in zip(figure.data, models, strict=True):
        trace.customdata = [_sublayer(owner, int(at)) for at in trace.x]
    return figure


def _sublayer(model: Model, index: int) -> str:
    return str(model.sites[index].name) if index < len(model.sites) else "the final norm"


def after_layers(model: Model) -> dict[str, dict[int, int]]:
    """Who reads first after each layer's attention and after its feed-forward, by layer; a layer that counts as one
    sublayer is taken for a feed-forward."""
    found: dict[str, dict[int, int]] = {}
    for site in model.sites:
        part = "attention" if "attention" in site.kind else "feed-forward"
        found.setdefault(part, {})[site.layer] = site.index + 1
    return {part: found[part] for part in sorted(found, reverse=True)}


def layers_later(model: Model, distance: Callable[[int, int], float | None]) -> Figure | None:
    """A heat map of the distance between what is read after layer ℓ (to the right) and n layers later (upward).

    `distance` takes two readers, the earlier first. None if no cell is known.
    """
    last = {site.layer: site.index + 1 for site in model.sites}
    layers = sorted(last)
    rows = [
        [distance(last[at], last[at + n]) if at + n in last else None for at in layers]
        for n in range(len(layers) - 1, 0, -1)
    ]
    if not any(value is not None for row in rows for value in row):
        return None
    rows = [[None if value is None else round(value, 4) for value in row] for row in rows]
    names, step = [str(n) for n in range(len(layers) - 1, 0, -1)], -(-len(layers) // LABELS)
    return heatmap(
        rows, numbers(len(layers)), names, "layer ℓ", "n layers later", "angle / π", bounds=(0.0, 0.5), height=440,
        step=step,
    )  # fmt: skip


def line(name: str, points: Points, colour: str, dash: str = "solid", symbol: str = "circle") -> Curve:
    """One curve; solid ones have markers."""
    x, y = [x for x, _ in points], [y for _, y in points]
    return Curve(name, x, y, colour, dash=dash, markers=dash == "solid", symbol=symbol)


def add_figure(section: Section, figure: Figure | None, caption: str = "") -> None:
    """Add the figure, if there is one."""
    if figure is not None:
        section.figure(figure, caption)


def add_tabs(section: Section, views: Mapping[str, Figure | None], caption: str = "") -> None:
    """Add the figures that there are, as tabs."""
    known = {title: figure for title, figure in views.items() if figure is not None}
    if known:
        section.tabs(known, caption)


def padded(row: Sequence[float], count: int) -> list[float | None]:
    """The row with empty cells up to `count`."""
    return [*row, *[None] * (count - len(row))]


def on_log(value: float, low: float, high: float) -> float:
    """Where a value stands on a logarithmic scale from `low` (0) to `high` (1)."""
    return math.log(max(value, low) / low) / math.log(high / low)


def numbers(count: int) -> list[str]:
    """`0`, `1`, … as labels."""
    return [str(i) for i in range(count)]
