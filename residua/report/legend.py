"""The surroundings of a figure: the legend, of buttons that show and hide a series, and the figure in words."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from residua.report.elements import breakable
from residua.report.figures import Figure
from residua.report.plain import escape

_DASHES = {"dot": "1.5 3", "dash": "6 3", "dashdot": "6 2 1.5 2"}
_MARKS = {
    "circle": '<circle cx="12" cy="6" r="4"/>',
    "square": '<path d="M8 2h8v8h-8z"/>',
    "diamond": '<path d="M12 .8l5 5.2-5 5.2-5-5.2z"/>',
    "triangle-up": '<path d="M12 1l5 9h-10z"/>',
    "triangle-down": '<path d="M12 11l5-9h-10z"/>',
    "cross": '<path d="M10.3 1.5h3.4v2.8h2.8v3.4h-2.8v2.8h-3.4v-2.8h-2.8v-3.4h2.8z"/>',
    "x": '<path d="M9 1l3 3.2 3-3.2 1.8 1.8-3.2 3.2 3.2 3.2-1.8 1.8-3-3.2-3 3.2-1.8-1.8 3.2-3.2-3.2-3.2z"/>',
}


def legend(figure: Figure) -> str:
    """A button per series of the figure, in the order of its traces; empty where only one series is drawn."""
    entries: dict[str, str] = {}
    for trace in figure.data:
        series = (trace.meta or {}).get("series") if isinstance(trace.meta, dict) else None
        if series is not None and trace.showlegend is not False and series not in entries:
            entries[series] = _swatch(trace)
    if len(entries) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-series="{escape(name)}">{swatch}{breakable(name)}</button>'
        for name, swatch in entries.items()
    )
    return f'<div class="legend" role="group" aria-label="Show or hide">{buttons}</div>'


def _swatch(trace: Any) -> str:
    """The line and the marker of a trace, or the colour of its bars."""
    if trace.type != "scatter":
        return _drawn(f'<path d="M6 0h12v12h-12z" fill="{escape(str(trace.marker.color))}"/>')
    parts, mode = [], trace.mode or ""
    if "lines" in mode:
        dash = _DASHES.get(trace.line.dash or "")
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<path d="M0 6h24" stroke="{escape(str(trace.line.color))}" stroke-width="2"{dashes}/>')
    if "markers" in mode:
        mark = _MARKS.get(trace.marker.symbol or "circle", _MARKS["circle"])
        parts.append(f'<g fill="{escape(str(trace.marker.color))}">{mark}</g>')
    return _drawn("".join(parts))


def _drawn(inside: str) -> str:
    return f'<svg viewBox="0 0 24 12" width="24" height="12" aria-hidden="true">{inside}</svg>'


def words(figure: Figure) -> str:
    """The figure in a few sentences, for those who do not see it: axes, and of each series where it ends."""
    across, up = (html.unescape(axis.title.text or "") for axis in (figure.layout.xaxis, figure.layout.yaxis))
    if not figure.data:
        return "An empty figure."
    first = figure.data[0]
    if first.type == "heatmap":
        return _heat_map(first, across, up)
    if first.type == "box":
        return _box_plot(first, across, up)
    shown = [trace for trace in figure.data if trace.hoverinfo != "skip"]
    parts = [part for trace in shown if (part := _series(trace))]
    kind = "Bars" if first.type == "bar" else "Plot"
    return f"{kind} of {up or 'values'}{f' by {across}' if across else ''}. {'; '.join(parts)}."


def _series(trace: Any) -> str:
    """A series' name with its values: all of a bar or of a few points, else the first and the last."""
    name = html.unescape(trace.name or "")
    if trace.type == "scatter" and trace.mode == "markers" and trace.text:
        return html.unescape("; ".join(trace.text))  # a forest's marks say it all
    points = [(x, y) for x, y in zip(_listed(trace.x), _listed(trace.y), strict=True) if _is_number(y) and x == x]
    if not points:
        return ""
    if trace.type == "bar" and len(points) <= 6:
        return f"{name}: {', '.join(f'{html.unescape(str(x))} {y:.4g}' for x, y in points)}"
    if len(points) == 1:
        return f"{name}: {points[0][1]:.4g} at {_shown(points[0][0])}"
    return (
        f"{name}: from {points[0][1]:.4g} at {_shown(points[0][0])} to {points[-1][1]:.4g} at {_shown(points[-1][0])}"
    )


def _box_plot(trace: Any, across: str, up: str) -> str:
    medians = list(zip(_listed(trace.median), _listed(trace.x), strict=True))
    (low, first), (high, last) = min(medians), max(medians)
    return (
        f"Box plots of {up} by {across}: {len(medians)} boxes. Medians from {low:.4g} at {_shown(first)} to {high:.4g} "
        f"at {_shown(last)}."
    )


def _heat_map(trace: Any, across: str, up: str) -> str:
    value = html.unescape(trace.colorbar.title.text or "values")
    cells = [
        (v, str(x), str(y))
        for row, y in zip(trace.z, _listed(trace.y), strict=True)
        for v, x in zip(row, _listed(trace.x), strict=True)
        if _is_number(v)
    ]
    size = f"{len(_listed(trace.y))} rows, {up}, and {len(_listed(trace.x))} columns, {across}"
    if not cells:
        return f"Heat map of {value}: {size}; every cell is empty."
    low, high = min(cells), max(cells)
    where = f"{up} {html.unescape(high[2])} and {across} {html.unescape(high[1])}"
    return f"Heat map of {value}: {size}. From {low[0]:.4g} to {high[0]:.4g}, the largest at {where}."


def _listed(values: Any) -> Sequence[Any]:
    return [] if values is None else list(values)


def _is_number(value: Any) -> bool:
    return value is not None and isinstance(value, int | float) and value == value


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else html.unescape(str(value))
