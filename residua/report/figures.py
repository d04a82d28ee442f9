"""The plots of report pages: curves with bands, grouped bars, heat maps. All labels are plain text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residua.report import theme
from residua.report.plain import escape

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Curve:
    """One line. Curves of one `group` share a legend entry; `low` and `high` draw a band around it."""

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
) -> Figure:
    """Lines over a common axis; `whole_x` puts ticks at whole numbers only."""
    from plotly.graph_objects import Figure, Scatter

    traces: list[Any] = []
    for curve in series:
        shared = {"legendgroup": escape(curve.group or curve.name), "name": escape(curve.name)}
        if curve.low is not None and curve.high is not None:
            edge = [*curve.high, *reversed(curve.low)]
            traces.append(
                Scatter(
                    x=[*curve.x, *reversed(curve.x)], y=edge, fill="toself", mode="lines", hoverinfo="skip",
                    fillcolor=theme.faded(curve.colour, 0.15), line={"width": 0}, showlegend=False, **shared,
                )
            )  # fmt: skip
        mode = "+".join(word for word, on in (("lines", curve.lines), ("markers", curve.markers)) if on)
        traces.append(
            Scatter(
                x=list(curve.x), y=list(curve.y), mode=mode, showlegend=curve.legend, opacity=curve.opacity,
                line={"color": curve.colour, "width": curve.width, "dash": curve.dash},
                marker={"color": curve.colour, "size": 7},
                hovertemplate="%{y:.4g}", **shared,
            )
        )  # fmt: skip
    figure = Figure(traces)
    label_axes(figure, x_title, y_title, height)
    figure.update_layout(hovermode="x unified" if len(series) <= 12 else "closest")
    if log_x:
        figure.update_xaxes(_logarithmic([x for curve in series for x in curve.x]))
    if log_y:
        figure.update_yaxes(_logarithmic([y for curve in series for y in curve.y if y is not None]))
    if whole_x:
        figure.update_xaxes(dtick=_whole_step(series))
    if y_range is not None:
        figure.update_yaxes(range=list(y_range))
    return figure


def _logarithmic(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis: labels per decade if there are many, at 1, 2 and 5 if few, automatic within one decade."""
    positive = [value for value in values if value > 0] or [1.0]
    decades = math.log10(max(positive) / min(positive))
    labels = {"tickformat": "~g"} if min(positive) > 1e-5 and max(positive) < 1e5 else {"exponentformat": "power"}
    return {"type": "log", "dtick": 1 if decades > 3 else "D2" if decades > 0.7 else None, **labels}


def _whole_step(series: Sequence[Curve]) -> int:
    return max(1, round(max(len(curve.x) for curve in series) / 16))


def grouped_bars(
    names: Sequence[str],
    parts: Mapping[str, Sequence[float | None]],
    colours: Sequence[str],
    y_title: str,
    *,
    line_at: float | None = None,
    height: int = 340,
) -> Figure:
    """Bars side by side for each name, one per part; `line_at` marks a reference value."""
    from plotly.graph_objects import Bar, Figure

    bars = [
        Bar(
            name=escape(part), x=[escape(name) for name in names], y=list(values), hovertemplate="%{y:.4g}",
            marker={"color": colour},
        )
        for (part, values), colour in zip(parts.items(), colours, strict=True)
    ]  # fmt: skip
    figure = Figure(bars)
    label_axes(figure, "", y_title, height)
    figure.update_layout(barmode="group", bargap=0.35, bargroupgap=0.08, hovermode="x unified")
    if line_at is not None:
        figure.add_hline(y=line_at, line={"color": theme.SERIES[0], "width": 1.5, "dash": "dot"})
    return figure


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
) -> Figure:
    """A matrix as colours, first row at the top. Missing cells (None) stay empty."""
    from plotly.graph_objects import Figure, Heatmap

    low, high = bounds if bounds else (None, None)
    centre = {"zmid": 0.0} if diverging else {}
    shown = Heatmap(
        z=[list(row) for row in values], x=[escape(v) for v in x], y=[escape(v) for v in y],
        zmin=low, zmax=high, autocolorscale=True, xgap=1, ygap=1, hoverongaps=False,
        colorbar={"title": {"text": escape(value_title)}},
        hovertemplate=f"{escape(x_title)} %{{x}}<br>{escape(y_title)} %{{y}}<br>%{{z:.4g}}<extra></extra>", **centre,
    )  # fmt: skip
    figure = Figure([shown])
    label_axes(figure, x_title, y_title, height or min(max(200, 24 * len(y) + 90), 620))
    figure.update_layout(margin_t=14)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def label_axes(figure: Figure, x_title: str, y_title: str, height: int) -> None:
    """Titles, height, margins, and the legend above the plot."""
    figure.update_layout(
        template=None,
        height=height,
        margin={"l": 64, "r": 20, "t": 34, "b": 48},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
    )
    figure.update_xaxes(title_text=escape(x_title))
    figure.update_yaxes(title_text=escape(y_title))
