"""Colours, markers and the Plotly templates for light, dark and paper.

A series keeps its look everywhere: `colour(place)` and `symbol(place)`, where `place` is its position in the study (0
is the baseline). A diagnosis of a study's run gets the same place (`ModelDiagnosis.place`). No two of the first 16
places share a colour, no two of the first 100 share both. Series colours have a contrast of 3 or more with both
backgrounds, so that only the background changes between light and dark.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

SERIES = (
    "#7d848f", "#2f7ed8", "#d9641c", "#4d9f0c", "#cf2a6f", "#9a3fe8", "#886800", "#00a385",
    "#0f9bb8", "#c08098", "#487840", "#806090", "#e858cf", "#a89060", "#f2616a", "#a06050",
)  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x")
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_PAPER = {
    "light": {"ink": "#3a414b", "grid": "#e6e9ee", "line": "#c3c9d1", "panel": "#ffffff"},
    "dark": {"ink": "#c4cad3", "grid": "#2b313a", "line": "#465060", "panel": "#1e232b"},
    "paper": {"ink": "#000000", "grid": "#dddddd", "line": "#888888", "panel": "#ffffff"},
}
# The lowest colour differs from the panel, so that a cell near zero does not look missing.
_SEQUENTIAL = {
    "light": ["#dce7f4", "#bfd7f0", "#94bee8", "#5d9bda", "#2f7ac4", "#175a9c", "#0b3a6b"],
    "dark": ["#2c3b50", "#24466f", "#22568c", "#2e72b5", "#5698d8", "#93c0ec", "#dcebfa"],
}
_DIVERGING = {
    "light": ["#a63d1f", "#e28a5f", "#f3cdb6", "#e4e7ec", "#b9d4ee", "#5d9bd6", "#1c5c9e"],
    "dark": ["#f09a6c", "#b55f36", "#69402f", "#3a424f", "#2a5077", "#3f80bf", "#9cc8f2"],
}


class Look(TypedDict):
    """The look of a series: keyword arguments of `Curve`, `Estimate` and `Point`."""

    colour: str
    symbol: str


def look(place: int) -> Look:
    """The colour and the marker of a series."""
    return {"colour": colour(place), "symbol": symbol(place)}


def colour(place: int) -> str:
    """The colour of a series, the same on every page; only place 0, the baseline, is grey."""
    return SERIES[1 + (place - 1) % (len(SERIES) - 1)] if place else SERIES[0]


def dash(place: int) -> str:
    """Plotly's name for a line's dashes, which distinguish series of the same colour."""
    return DASHES[max(0, place - 1) // (len(SERIES) - 1) % len(DASHES)]


def symbol(place: int) -> str:
    """Plotly's name for a series' marker, which distinguishes series when colours do not."""
    return SYMBOLS[place % len(SYMBOLS)]


def faded(hex_colour: str, opacity: float) -> str:
    """The colour with this opacity, in Plotly's format."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def embeddable(text: str) -> str:
    """Escape JSON for a <script> element, so that it can neither close the element nor open a comment."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def templates_json() -> str:
    """The Plotly templates, for the script that switches between them."""
    return embeddable(json.dumps({name: _template(name) for name in _PAPER}))


def _template(name: str) -> dict[str, Any]:
    paper = _PAPER[name]
    axis = {
        "gridcolor": paper["grid"], "linecolor": paper["line"], "zerolinecolor": paper["grid"], "zeroline": False,
        "tickcolor": paper["line"], "ticks": "outside", "ticklen": 4, "showline": True, "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13}},
    }  # fmt: skip
    scales = "dark" if name == "dark" else "light"
    sequential, diverging = _scale(_SEQUENTIAL[scales]), _scale(_DIVERGING[scales])
    bar = {"outlinewidth": 0, "thickness": 12, "ticklen": 3, "title": {"side": "right", "font": {"size": 13}}}
    return {
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 12.5, "color": paper["ink"]},
            "colorway": list(SERIES),
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": paper["panel"], "bordercolor": paper["line"], "font": {"color": paper["ink"]}},
            "annotationdefaults": {"bgcolor": paper["panel"], "borderpad": 1},
            "coloraxis": {"colorbar": bar, "colorscale": sequential},
            "colorscale": {"sequential": sequential, "sequentialminus": sequential, "diverging": diverging},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": paper["line"], "activecolor": paper["ink"]},
        },
        "data": {"heatmap": [{"colorbar": bar}]},
    }


def _scale(stops: list[str]) -> list[list[object]]:
    return [[index / (len(stops) - 1), stop] for index, stop in enumerate(stops)]
