"""A forest plot: one line per series with its value and its interval, and a reference that the interval may cross."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from residua.report import theme
from residua.report.figures import framed, of_series
from residua.report.plain import escape
from residua.report.scatter import span

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROW = 38
_FRAME = 74


@dataclass(frozen=True)
class Estimate:
    """A value and the ends of its interval, infinite where open; without `ends` there is no interval, and it is hollow.

    `text` is what stands at the right of its line, `detail` what a hover and a screen reader add to it.
    """

    name: str
    value: float
    colour: str
    ends: tuple[float, float] | None = None
    text: str = ""
    detail: str = ""
    symbol: str = "circle"


def forest(rows: Sequence[Estimate], x_title: str, *, reference: float = 0.0, height: int | None = None) -> Figure:
    """The first row at the top, names above their lines, a dashed line at `reference`; wide intervals end in arrows."""
    low, high = span([*(row.value for row in rows), reference], [row.ends for row in rows], reach=3.0)
    traces: list[dict[str, Any]] = []
    for place, row in enumerate(rows):
        ends = None if row.ends is None else (max(row.ends[0], low), min(row.ends[1], high))
        said = escape(f"{row.name}: {row.text or format(row.value, '.4g')}{f', {row.detail}' if row.detail else ''}")
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
                "meta": of_series(row.name), "showlegend": False, "text": [said],
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
    figure.add_vline(x=reference, line={"color": theme.SERIES[0], "width": 1.5, "dash": "dash"})
    return figure


def _caps(row: Estimate, ends: tuple[float, float]) -> dict[str, object]:
    """A bar at each end of the interval; an arrow where it runs out of the frame."""
    cut = [shown != end for shown, end in zip(ends, row.ends or ends, strict=True)]
    arrows = ("triangle-left", "triangle-right")
    return {
        "color": row.colour, "size": 9, "line": {"color": row.colour, "width": 2},
        "symbol": [arrow if out else "line-ns" for arrow, out in zip(arrows, cut, strict=True)],
    }  # fmt: skip


def height_of(rows: int) -> int:
    """The height of a forest plot with so many rows, in pixels."""
    return max(180, _FRAME + _ROW * rows)


def both_ends(low: float | None, high: float | None) -> tuple[float, float] | None:
    """The ends of an interval, an open one infinite; None if both are open."""
    if low is None and high is None:
        return None
    return (-math.inf if low is None else low), (math.inf if high is None else high)
