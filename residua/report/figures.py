"""The plots of report pages: curves with bands, grouped bars, heat maps, forests. All labels are plain text.

Every trace names its series in `meta`: the page builds a legend from these names, and hovering over a series highlights
it in every figure and table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from residua.report import theme
from residua.report.plain import escape, printable

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Figure
else:
    Figure = Any  # Plotly takes a second to import, so it is imported only for drawing

T = TypeVar("T")

MOST_GAPS = 100
"""Heat maps with more rows or columns have no lines between cells."""


@dataclass(frozen=True)
class Curve:
    """One line. Curves of one `group` share a legend entry; `low` and `high` draw a band around it.

    `symbol` is Plotly's name for the marker (`theme.symbol`).
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    group: str = ""
    legend: bool = True
    width: float = 2.0
    opacity: float = 1.0
    dash: str = "solid"
    markers: bool = False
    symbol: str = "circle"
    lines: bool = True
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def curves(
    series: Sequence[Curve],
    x_title: str,
    y_title: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    whole_x: bool = False,
    y_range: tuple[float, float] | None = None,
    height: int = 400,
    x_axis: Mapping[str, Any] | None = None,
) -> Figure:
    """Lines over a common axis; `whole_x` puts ticks only at integers, `x_axis` are Plotly settings for the axis."""
    traces = []
    for curve in series:
        shared = {"name": escape(curve.name), "meta": of_series(curve.group or curve.name)}
        if curve.low is not None and curve.high is not None:
            edge = [*curve.high, *reversed(curve.low)]
            traces.append(
                {
                    "type": "scatter", "x": [*curve.x, *reversed(curve.x)], "y": edge, "fill": "toself",
                    "mode": "lines", "hoverinfo": "skip", "fillcolor": theme.faded(curve.colour, 0.15),
                    "line": {"width": 0}, "showlegend": False, **shared,
                }
            )  # fmt: skip
        mode = "+".join(word for word, on in (("lines", curve.lines), ("markers", curve.markers)) if on)
        traces.append(
            {
                "type": "scatter", "x": list(curve.x), "y": list(curve.y), "mode": mode, "showlegend": curve.legend,
                "opacity": curve.opacity, "line": {"color": curve.colour, "width": curve.width, "dash": curve.dash},
                "marker": {"color": curve.colour, "size": 7, "symbol": curve.symbol},
                "hovertemplate": f"{escape(curve.name)}: %{{y:.4g}}<br>{escape(x_title)} %{{x}}<extra></extra>",
                **shared,
            }
        )  # fmt: skip
    across, up = dict(x_axis or {}), {} if y_range is None else {"range": list(y_range)}
    if log_x:
        across |= _logarithmic([x for curve in series for x in curve.x])
    if log_y:
        up |= _logarithmic([y for curve in series for y in curve.y if y is not None])
    if whole_x:
        across["dtick"] = max(1, round(max(len(curve.x) for curve in series) / 16))
    return framed(traces, x_title, y_title, height, x=across, y=up)


def _logarithmic(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis: labels per decade if there are many, at 1, 2 and 5 if few, automatic within one decade."""
    positive = [value for value in values if value > 0] or [1.0]
    decades = math.log10(max(positive) / min(positive))
    labels = {"tickformat": "~g"} if min(positive) > 1e-5 and max(positive) < 1e5 else {"exponentformat": "power"}
    return {"type": "log", "dtick": 1 if decades > 3 else "D2" if decades > 0.7 else None, **labels}


def grouped_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float | None]],
    colours: Sequence[str],
    y_title: str,
    *,
    line_at: float | None = None,
    step: int | None = None,
) -> Figure:
    """Bars side by side for each name, one per part; `line_at` marks a reference value.

    With `step`, the axis shows every `step`-th name.
    """
    bars = [
        {
            "type": "bar", "name": escape(part), "x": [escape(name) for name in names], "y": list(values),
            "meta": of_series(part), "hovertemplate": f"{escape(part)}: %{{y:.4g}}<br>%{{x}}<extra></extra>",
            "marker": {"color": colour},
        }
        for (part, values), colour in zip(parts.items(), colours, strict=True)
    ]  # fmt: skip
    groups: dict[str, Any] = {"barmode": "group", "bargap": 0.35, "bargroupgap": 0.08}
    figure = framed(bars, "", y_title, 340, x=_stepped(step), **groups)
    if line_at is not None:
        figure.add_hline(y=line_at, line={"color": theme.SERIES[0], "width": 1.5, "dash": "dot"})
    return figure


@dataclass(frozen=True)
class Box:
    """One box of a box plot: ends of the whiskers, quartiles, median, mean, and maximum."""

    name: str
    low: float
    lower: float
    median: float
    upper: float
    high: float
    mean: float
    largest: float


def boxes(drawn: Sequence[Box], x_title: str, y_title: str) -> Figure:
    """Box plots side by side, the mean dashed, a ring at the largest value."""
    names, colour, ring = [escape(box.name) for box in drawn], theme.colour(1), theme.colour(2)
    shown = {
        "type": "box", "name": escape(y_title), "x": names, "lowerfence": [box.low for box in drawn],
        "q1": [box.lower for box in drawn], "median": [box.median for box in drawn],
        "q3": [box.upper for box in drawn], "upperfence": [box.high for box in drawn],
        "mean": [box.mean for box in drawn], "boxmean": True, "marker": {"color": colour}, "line": {"width": 1.2},
        "fillcolor": theme.faded(colour, 0.3), "meta": of_series("quartiles"),
    }  # fmt: skip
    rings = {
        "type": "scatter", "name": "largest", "x": names, "y": [box.largest for box in drawn], "mode": "markers",
        "marker": {"color": ring, "symbol": "circle-open", "size": 8}, "meta": of_series("largest"),
        "hovertemplate": "largest: %{y:.4g}<br>%{x}<extra></extra>",
    }  # fmt: skip
    axis = {"type": "category", "showgrid": False, **_stepped(-(-len(drawn) // 12))}
    return framed([shown, rings], x_title, y_title, 400, x=axis)


def heatmap(
    values: Sequence[Sequence[float | None]],
    x: Sequence[str],
    y: Sequence[str],
    x_title: str,
    y_title: str,
    value_title: str,
    *,
    bounds: tuple[float, float] | None = None,
    diverging: bool = False,
    height: int | None = None,
    step: int | tuple[int, int] | None = None,
) -> Figure:
    """A matrix as colours, first row at the top. Missing cells (None) stay empty; values near zero are light.

    With `step`, each axis shows every `step`-th name; two numbers set it for columns and rows.
    """
    low, high = bounds if bounds else (None, None)
    centre = {"zmid": 0.0} if diverging else {}
    shown = {
        "type": "heatmap", "z": [list(row) for row in values], "x": [escape(v) for v in x],
        "y": [escape(v) for v in y], "zmin": low, "zmax": high, "autocolorscale": True,
        "xgap": _gap(x), "ygap": _gap(y),
        "hoverongaps": False, "colorbar": {"title": {"text": escape(value_title)}},
        "hovertemplate": f"{escape(x_title)} %{{x}}<br>{escape(y_title)} %{{y}}<br>%{{z:.4g}}<extra></extra>",
        **centre,
    }  # fmt: skip
    across, down = step if isinstance(step, tuple) else (step, step)
    axis = {"type": "category", "showgrid": False}
    tall = height or min(max(200, 24 * len(y) + 90), 620)
    rows = {**axis, **_stepped(down), "autorange": "reversed"}
    return framed([shown], x_title, y_title, tall, x={**axis, **_stepped(across)}, y=rows)


def _gap(names: Sequence[str]) -> int:
    """The width of the line between cells: 0 if the cells are too narrow for one."""
    return 1 if len(names) <= MOST_GAPS else 0


def _stepped(step: int | None) -> dict[str, Any]:
    return {} if step is None else {"tickmode": "linear", "dtick": step}


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """At most `most` evenly spaced rows, including the first and the last."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def of_series(name: str) -> dict[str, str]:
    """The `meta` of a series' trace: the name by which legends and tables highlight it."""
    return {"series": printable(name)}


def framed(
    traces: Sequence[Mapping[str, Any]],
    x_title: str,
    y_title: str,
    height: int,
    *,
    x: Mapping[str, Any] | None = None,
    y: Mapping[str, Any] | None = None,
    **layout: Any,
) -> Figure:
    """Traces with titles, height and margins; `x`, `y` and `layout` are Plotly settings for the axes and the layout.

    The page draws the legend (`section.py`), not Plotly. All settings go in at once, since each `update_…` call costs
    as much as building a small figure.
    """
    from plotly.graph_objects import Figure

    settings = {
        "height": height,
        "margin": {"l": 58, "r": 16, "t": 12, "b": 46},
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": {"title": {"text": escape(x_title)}, **(x or {})},
        "yaxis": {"title": {"text": escape(y_title)}, **(y or {})},
    }
    figure = Figure(traces, {"template": {}, **settings, **layout})  # {}: otherwise Plotly uses its own
    figure.layout.template = None
    return figure


_FOREST_ROW = 38
_FOREST_FRAME = 74


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval, infinite if open; without `ends` there is no interval and a hollow marker.

    `text` appears to the right of its line; `detail` is added on hover and for screen readers.
    """

    name: str
    value: float
    colour: str
    ends: tuple[float, float] | None = None
    text: str = ""
    detail: str = ""
    symbol: str = "circle"


def forest(rows: Sequence[Estimate], x_title: str, *, height: int | None = None) -> Figure:
    """The first row at the top, names above their lines, a dashed line at 0; wide intervals end in arrows."""
    low, high = span([*(row.value for row in rows), 0.0], [row.ends for row in rows], reach=3.0)
    traces: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        ends = None if row.ends is None else (max(row.ends[0], low), min(row.ends[1], high))
        label = escape(f"{row.name}: {row.text or format(row.value, '.4g')}{f', {row.detail}' if row.detail else ''}")
        if ends is not None:
            traces.append(
                {
                    "type": "scatter", "x": list(ends), "y": [place, place], "mode": "lines+markers",
                    "name": escape(row.name), "meta": of_series(row.name), "showlegend": False, "hoverinfo": "skip",
                    "line": {"color": row.colour, "width": 2.5}, "marker": _caps(row, ends),
                }
            )  # fmt: skip
        traces.append(
            {
                "type": "scatter", "x": [row.value], "y": [place], "mode": "markers", "name": escape(row.name),
                "meta": of_series(row.name), "showlegend": False, "text": [label],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": row.colour, "size": 10, "symbol": row.symbol if ends else f"{row.symbol}-open",
                           "line": {"color": row.colour, "width": 0 if ends else 2}},
            }
        )  # fmt: skip
    labels = [
        {
            "text": escape(words), "xref": "paper", "x": at, "xanchor": anchor, "y": place, "yanchor": "bottom",
            "yshift": 7, "showarrow": False, "font": {"size": 12},
        }
        for place, row in enumerate(rows)
        for words, at, anchor in ((row.name, 0.0, "left"), (row.text, 1.0, "right"))
        if words
    ]  # fmt: skip
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "showline": False}
    figure = framed(
        traces, x_title, "", height or height_of(len(rows)), x={"range": [low, high]},
        y={"range": [len(rows) - 0.5, -0.85], **bare}, annotations=labels, margin={"l": 12, "r": 12, "t": 8, "b": 46},
    )  # fmt: skip
    figure.add_vline(x=0.0, line={"color": theme.SERIES[0], "width": 1.5, "dash": "dash"})
    return figure


def _caps(row: Estimate, ends: tuple[float, float]) -> dict[str, object]:
    """A cap at each end of the interval; an arrow if it extends beyond the frame."""
    cut = [shown != end for shown, end in zip(ends, row.ends or ends, strict=True)]
    arrows = ("triangle-left", "triangle-right")
    return {
        "color": row.colour, "size": 9, "line": {"color": row.colour, "width": 2},
        "symbol": [arrow if out else "line-ns" for arrow, out in zip(arrows, cut, strict=True)],
    }  # fmt: skip


def height_of(rows: int) -> int:
    """The height of a forest plot with this many rows, in pixels."""
    return max(180, _FOREST_FRAME + _FOREST_ROW * rows)


def span(
    values: Sequence[float], ends: Sequence[tuple[float, float] | None], reach: float = 1.0
) -> tuple[float, float]:
    """An axis range that fits all values, and their intervals up to `reach` times the extent of the values."""
    low, high = min(values), max(values)
    extent = (high - low) or 0.2 * abs(high) or 1.0
    edges = [edge for pair in ends if pair is not None for edge in pair]
    low = min([low, *(max(edge, low - reach * extent) for edge in edges)])
    high = max([high, *(min(edge, high + reach * extent) for edge in edges)])
    room = 0.08 * (high - low or extent)
    return low - room, high + room
