"""A section of a page: text, tables, cards, collapsible blocks and figures, in the order they are added."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from residua.report import theme
from residua.report.elements import (
    Card,
    Cell,
    Column,
    Sorted,
    Strip,
    Track,
    breakable,
    cards_html,
    cell,
    good_html,
    meanings,
    strips_html,
    table,
)
from residua.report.figures import Figure
from residua.report.plain import escape

Tone = Literal["", "good", "bad", "unsure"]
"""Good news is green, bad news red, an unclear result yellow; an adjacent word always says the same."""


@dataclass(frozen=True)
class Picture:
    """A figure with a title above it and a caption below."""

    figure: Figure
    title: str = ""
    caption: str = ""


class Section:
    """A heading, a sentence on what to look for, and the content in insertion order."""

    def __init__(self, title: str, look_for: str, new_anchor: Callable[[str], str]) -> None:
        self._new_anchor = new_anchor
        self._parts: list[str] = []
        self.title = title
        self.look_for = look_for
        self.anchor = new_anchor(title)
        self.has_figures = False

    def text(self, sentence: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{escape(sentence)}</p>")

    def verdict(self, sentence: str, tone: Tone = "") -> None:
        """One key sentence in larger type."""
        self._parts.append(f'<p class="verdict" data-tone="{tone}">{escape(sentence)}</p>')

    def subheading(self, title: str) -> None:
        """A heading inside the section."""
        self._parts.append(f"<h3>{escape(title)}</h3>")

    def points(self, sentences: Iterable[str]) -> None:
        """A list of sentences."""
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        self._parts.append(f"<ul>{items}</ul>")

    def note(self, sentence: str) -> None:
        """A highlighted remark: something was changed, was omitted or failed."""
        self._parts.append(f'<p class="note">{escape(sentence)}</p>')

    def good(self, sentence: str) -> None:
        """A green line: nothing is wrong."""
        self._parts.append(good_html(sentence))

    def cards(self, cards: Sequence[Card]) -> None:
        """Cards side by side; nothing if there are none."""
        if cards:
            self._parts.append(cards_html(cards))

    def strips(self, tracks: Sequence[Track], strips: Sequence[Strip], caption: str) -> None:
        """Models layer by layer, side by side."""
        self._parts.append(strips_html(tracks, strips, caption))

    def code(self, text: str) -> None:
        """Preformatted text: a configuration, a command."""
        self._parts.append(f'<pre tabindex="0">{escape(text)}</pre>')

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Names and values, side by side."""
        self._parts.append(facts_list(facts))

    @contextmanager
    def fold(self, summary: str) -> Iterator[None]:
        """Collapse the content added inside the `with` block until the reader opens it; print shows it."""
        self._parts.append(f'<details class="fold"><summary>{escape(summary)}</summary><div>')
        yield
        self._parts.append("</div></details>")

    def table(
        self,
        columns: Sequence[Column],
        rows: Iterable[Sequence[Cell]],
        emphasised: Iterable[int] = (),
        order: Sorted | None = None,
    ) -> None:
        """A table that scrolls sideways within itself if needed; rows with an index in `emphasised` are highlighted.

        With `order`, the reader can sort by any column; it names the column of the initial order.
        """
        self._parts.append(table(self.title, columns, rows, set(emphasised), order))
        self._parts.append(meanings(columns))

    def figure(self, figure: Figure, caption: str = "") -> None:
        """One interactive plot, with its axes and values in words for a screen reader."""
        self._parts.append(self._figure(Picture(figure, "", caption)))

    def beside(self, *pictures: Picture) -> None:
        """Plots side by side if they fit, else stacked."""
        self._parts.append(f'<div class="beside">{"".join(map(self._figure, pictures))}</div>')

    def tabs(self, figures: Mapping[str, Figure], caption: str = "") -> None:
        """Several views; the reader sees one at a time on screen, and all of them in print."""
        group = self._new_anchor(f"{self.title} view")
        labels, panels = [], []
        for index, (label, figure) in enumerate(figures.items()):
            identifier, selected = f"{group}-{index}", "true" if index == 0 else "false"
            labels.append(
                f'<button type="button" role="tab" id="{identifier}-tab" aria-controls="{identifier}" '
                f'aria-selected="{selected}" tabindex="{0 if index == 0 else -1}">{escape(label)}</button>'
            )
            panels.append(
                f'<div role="tabpanel" id="{identifier}" aria-labelledby="{identifier}-tab"'
                f'{"" if index == 0 else " hidden"}><p class="panel-title">{escape(label)}</p>'
                f"{self._plot(figure)}</div>"
            )
        bar = f'<div role="tablist" aria-label="{escape(self.title)}">{"".join(labels)}</div>'
        self._parts.append(f'<figure class="tabs">{bar}{"".join(panels)}{_caption(caption)}</figure>')

    def slot(self, name: str) -> None:
        """A place that the script of a live page fills: the element `live-NAME`."""
        self._parts.append(f'<div id="live-{escape(name)}"></div>')

    def slots_beside(self, figures: Mapping[str, tuple[str, str]]) -> None:
        """Side-by-side places for a live page's plots: name, then title and caption. Hidden until they are filled."""
        self.has_figures = True
        empty = '<script type="application/json">{"data": [], "layout": {}}</script>'
        slots = [
            f'<figure hidden><p class="figure-title">{escape(title)}</p><div class="plot" id="live-{escape(name)}" '
            f'role="group" aria-label="{escape(title)}, {escape(caption)}" style="height:300px">{empty}</div>'
            f"{_caption(caption)}</figure>"
            for name, (title, caption) in figures.items()
        ]
        self._parts.append(f'<div class="beside">{"".join(slots)}</div>')

    def _figure(self, picture: Picture) -> str:
        title = f'<p class="figure-title">{escape(picture.title)}</p>' if picture.title else ""
        plot = self._plot(picture.figure, picture.title)
        return f"<figure>{title}{plot}{_caption(picture.caption)}</figure>"

    def _plot(self, figure: Figure, title: str = "") -> str:
        self.has_figures = True
        height = int(figure.layout.height or 360)
        described = " ".join(part for part in (title and f"{title.rstrip('.')}.", words(figure)) if part)
        return (
            f"{legend(figure)}"
            f'<div class="plot" role="group" aria-label="{escape(described)}" style="height:{height}px">'
            f'<script type="application/json">{theme.embeddable(figure.to_json())}</script></div>'
        )

    def html(self) -> str:
        """The section as HTML."""
        look = f'<p class="look-for">{escape(self.look_for)}</p>' if self.look_for else ""
        return (
            f'<section id="{self.anchor}" aria-labelledby="{self.anchor}-title">'
            f'<h2 id="{self.anchor}-title">{escape(self.title)}</h2>{look}{"".join(self._parts)}</section>'
        )


def facts_list(facts: Mapping[str, Cell]) -> str:
    """Names and values as HTML; empty if there are none."""
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{cell(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{items}</dl>' if items else ""


def _caption(caption: str) -> str:
    return f"<figcaption>{escape(caption)}</figcaption>" if caption else ""


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
    """A button per series of the figure, in the order of its traces; empty if only one series is drawn."""
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
    """The figure in a few sentences for screen readers: the axes, and the values of each series."""
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
    """A series' name with its values: all of them for bars or a few points, else the first and the last."""
    name = html.unescape(trace.name or "")
    if trace.type == "scatter" and trace.mode == "markers" and trace.text:
        return html.unescape("; ".join(trace.text))  # a forest's labels already say it
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
