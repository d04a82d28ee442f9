"""Shared figures of the metrics: one line per model in every curve, one tab per heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from residua.report import Cell, Column, Page, Series, theme
from residua.report.figures import Curve, Figure, curves, heatmap

Model = Any
"""A `ModelDiagnosis`. Its fields are the keys of all metrics, which no static type can list."""
Models = Sequence[Model]
Points = list[tuple[float, float]]
Select = Callable[[Model], Points]
NONE = "—"
LABELS = 12
"""An axis names at most this many layers."""


def label_step(count: int, most: int = LABELS) -> int:
    """Return the step between the names to print, out of `count`, on an axis with room for `most`."""
    return max(1, -(-count // most))


@dataclass(frozen=True)
class Table:
    """Columns and rows; the first column names the model."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Part:
    """One item to show: a figure, figures by tab title, a table, or a remark; None and {} are omitted.

    `heading` stands above it if it is shown.
    """

    content: Figure | Mapping[str, Figure | None] | Table | str | None
    caption: str = ""
    heading: str = ""


class Topic:
    """A section of the page: title, description of a healthy model, and parts in order. Without parts, it is
    omitted."""

    def __init__(self, title: str, healthy: str, *parts: Part) -> None:
        self.title, self.healthy, self.parts = title, healthy, parts

    def draw(self, page: Page) -> None:
        contents = [(part, _known(part.content)) for part in self.parts]
        if all(content is None for _, content in contents):
            return
        section = page.section(self.title, self.healthy)
        for part, content in contents:
            if content is not None and part.heading:
                section.subheading(part.heading)
            match content:
                case None:
                    continue
                case str():
                    section.note(content)
                case Table():
                    section.table([Column("model", numeric=False), *content.columns], content.rows)
                case dict():
                    section.tabs(content, part.caption)
                case _:
                    section.figure(content, part.caption)


def _known(content: Any) -> Any:
    """Drop missing figures from the content; None if nothing is left."""
    if isinstance(content, Mapping):
        return {title: figure for title, figure in content.items() if figure is not None} or None
    return None if content == "" or (isinstance(content, Table) and not content.rows) else content


def tab_each(models: Models, draw: Callable[[Model], Figure | None]) -> dict[str, Figure | None]:
    """One tab for each model."""
    return {model.name: draw(model) for model in models}


def tabs_each(models: Models, draw: Callable[[Model], Mapping[str, Figure | None]]) -> dict[str, Figure | None]:
    """Several tabs per model; with several models, each tab's title begins with the model's name."""
    several = len(models) > 1
    return {
        f"{model.name}: {title}" if several else title: figure
        for model in models
        for title, figure in draw(model).items()
    }


def places(models: Models) -> list[int]:
    """The number of each model, which sets its colour and marker; the one in the study if all come from one."""
    known = [model.place for model in models]
    return list(range(1, len(models) + 1)) if None in known or len(set(known)) < len(known) else known


def colours(models: Models) -> list[str]:
    """The colour of each model, the same in every figure of the page and on the page of its study."""
    return [theme.colour(place) for place in places(models)]


def owners(models: Models) -> list[Series]:
    """The models as cells of a table, each with its colour."""
    return [Series(model.name, colour) for model, colour in zip(models, colours(models), strict=True)]


def over(facts: str, value: str, at: str = "layer", *, zeros: bool = True) -> Select:
    """Select a value of each of a model's facts by layer, or by the field `at`; omits None, and 0 unless `zeros`."""

    def points(model: Model) -> Points:
        known = [(getattr(f, at), getattr(f, value)) for f in getattr(model, facts)]
        return [(place, number) for place, number in known if number or (zeros and number is not None)]

    return points


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

    `floor` is a reference for comparison, drawn dotted: once if all models share it, else once per model. Unless `x` is
    "layer", points are numbered by sublayer; the axis then names layers, and hovering shows sublayers.
    """
    series, drawn = [], []
    floors = [] if floor is None else [curve for model in models if (curve := floor(model))]
    shared = bool(floors) and all(other == floors[0] for other in floors)
    if shared:
        series.append(line(floor_name, floors[0], theme.colour(0), dash="dot"))
        drawn.append(models[0])
    for model, place in zip(models, places(models), strict=True):
        curve, colour = points(model), theme.colour(place)
        if curve:
            series.append(line(model.name, curve, colour, symbol=theme.symbol(place)))
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
    """Curves whose axis names layers and whose hover text names sublayers; curve i belongs to model i."""
    deepest = max(models, key=lambda model: len(model.sites))
    starts = [
        site.index for site in deepest.sites if site.index == 0 or deepest.sites[site.index - 1].layer != site.layer
    ]
    shown = starts[:: label_step(len(starts))]
    axis = {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [f"layer {deepest.sites[k].layer}" for k in shown],
        "unifiedhovertitle": {"text": "%{customdata}"},
    }
    figure = curves(series, x, y, whole_x=True, x_axis=axis, **settings)
    for trace, owner in zip(figure.data, models, strict=True):
        trace.customdata = [reader_name(owner, int(at)) for at in trace.x]
    return figure


def reader_name(model: Model, index: int) -> str:
    """The name of a sublayer, or of the final norm, which counts as the one after the last."""
    return str(model.sites[index].name) if index < len(model.sites) else "the final norm"


def after_layers(model: Model) -> dict[str, dict[int, int]]:
    """By layer, the first reader after its attention and after its feed-forward; a layer that counts as one sublayer is
    treated as a feed-forward."""
    places: dict[str, dict[int, int]] = {}
    for site in model.sites:
        part = "attention" if "attention" in site.kind else "feed-forward"
        places.setdefault(part, {})[site.layer] = site.index + 1
    return {part: places[part] for part in sorted(places, reverse=True)}


def layers_later(model: Model, distance: Callable[[int, int], float | None]) -> Figure | None:
    """A heat map of the distance between the states read after layer ℓ (x axis) and n layers later (y axis).

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
    names, step = [str(n) for n in range(len(layers) - 1, 0, -1)], label_step(len(layers))
    return heatmap(
        rows, numbers(len(layers)), names, "layer ℓ", "n layers later", "angle / π", bounds=(0.0, 0.5), height=440,
        step=step,
    )  # fmt: skip


def line(name: str, points: Points, colour: str, dash: str = "solid", symbol: str = "circle") -> Curve:
    """One curve; solid ones have markers."""
    x, y = [x for x, _ in points], [y for _, y in points]
    return Curve(name, x, y, colour, dash=dash, markers=dash == "solid", symbol=symbol)


def padded(row: Sequence[float], count: int) -> list[float | None]:
    """Pad the row with empty cells to `count`."""
    return [*row, *[None] * (count - len(row))]


def on_log(value: float, low: float, high: float) -> float:
    """The position of a value on a logarithmic scale from `low` (0) to `high` (1)."""
    return math.log(max(value, low) / low) / math.log(high / low)


def numbers(count: int) -> list[str]:
    """`0`, `1`, … as labels."""
    return [str(i) for i in range(count)]
