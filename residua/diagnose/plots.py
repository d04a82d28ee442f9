"""What the metrics' figures share: one line per model in every curve, one tab per model in every heat map."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from residua.diagnose.metric import Model, Models
from residua.report import Section, theme
from residua.report.figures import Curve, curves

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

Points = list[tuple[float, float]]
Select = Callable[[Model], Points]
NONE = "—"


def place(models: Models, index: int) -> int:
    """The place that decides the colour (`theme.colour`): that in the study if all models come from one."""
    known = [model.place for model in models]
    return index + 1 if None in known or len(set(known)) < len(known) else known[index]


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
    """A quantity over depth, one line per model; None if no model has it.

    `floor` is a reference to compare with, drawn dotted: once if all models share it, else once per model.
    """
    series = []
    floors = [] if floor is None else [found for model in models if (found := floor(model))]
    shared = bool(floors) and all(other == floors[0] for other in floors)
    if shared:
        series.append(line(floor_name, floors[0], theme.colour(0), dash="dot"))
    for index, model in enumerate(models):
        found = points(model)
        if found:
            colour = theme.colour(place(models, index))
            series.append(line(model.name, found, colour))
            if floor is not None and not shared:
                series.append(line(f"{model.name}, {floor_name}", floor(model), colour, dash="dot"))
    return curves(series, x, y, log_y=log, whole_x=True, y_range=bounds, height=340) if series else None


def line(name: str, points: Points, colour: str, dash: str = "solid") -> Curve:
    """One curve; solid ones have markers."""
    return Curve(name, [x for x, _ in points], [y for _, y in points], colour, dash=dash, markers=dash == "solid")


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


def numbers(count: int) -> list[str]:
    """`0`, `1`, … as labels."""
    return [str(i) for i in range(count)]
