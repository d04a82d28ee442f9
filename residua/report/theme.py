"""Colours and the two Plotly templates. Series colours are readable on both backgrounds, so only the paper changes."""

from __future__ import annotations

import json
from typing import Any

SERIES = (
    "#7d848f", "#2f7ed8", "#e0752d", "#2a9d6f", "#9b62c9", "#d14a5f", "#1a9bab", "#b58b1c", "#d671a8", "#6d8f2e",
)  # fmt: skip
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_PAPER = {
    "light": {"ink": "#3a414b", "grid": "#e6e9ee", "line": "#c3c9d1", "panel": "#ffffff"},
    "dark": {"ink": "#c4cad3", "grid": "#2b313a", "line": "#465060", "panel": "#1e232b"},
}
_SEQUENTIAL = {
    "light": ["#f6f8fb", "#d6e4f5", "#a5c8ec", "#66a1de", "#2f7ac4", "#175a9c", "#0b3a6b"],
    "dark": ["#1b2028", "#1d3350", "#1f4f83", "#2e72b5", "#5698d8", "#93c0ec", "#dcebfa"],
}
_DIVERGING = {
    "light": ["#a63d1f", "#e28a5f", "#f7d9c6", "#f7f8fa", "#c5dcf2", "#5d9bd6", "#1c5c9e"],
    "dark": ["#f09a6c", "#b55f36", "#5d3525", "#232830", "#24466b", "#3f80bf", "#9cc8f2"],
}


def colour(index: int) -> str:
    """The colour of a page's index-th series, the same in every plot; only the first is grey."""
    return SERIES[1 + (index - 1) % (len(SERIES) - 1)] if index else SERIES[0]


def faded(hex_colour: str, opacity: float) -> str:
    """The colour with this opacity, as Plotly wants it."""
    red, green, blue = (int(hex_colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def embeddable(text: str) -> str:
    """JSON escaped for a <script> element: nothing in it can close the element or open a comment."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def templates_json() -> str:
    """Both Plotly templates, for the script that switches between them."""
    return embeddable(json.dumps({name: _template(name) for name in _PAPER}))


def _template(name: str) -> dict[str, Any]:
    paper = _PAPER[name]
    axis = {
        "gridcolor": paper["grid"], "linecolor": paper["line"], "zerolinecolor": paper["grid"], "zeroline": False,
        "tickcolor": paper["line"], "ticks": "outside", "ticklen": 4, "showline": True, "automargin": True,
        "title": {"standoff": 10, "font": {"size": 13}},
    }  # fmt: skip
    sequential, diverging = _scale(_SEQUENTIAL[name]), _scale(_DIVERGING[name])
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
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            "coloraxis": {"colorbar": bar, "colorscale": sequential},
            "colorscale": {"sequential": sequential, "sequentialminus": sequential, "diverging": diverging},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": paper["line"], "activecolor": paper["ink"]},
        },
        "data": {"heatmap": [{"colorbar": bar}]},
    }


def _scale(stops: list[str]) -> list[list[object]]:
    return [[index / (len(stops) - 1), stop] for index, stop in enumerate(stops)]
