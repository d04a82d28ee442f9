"""A self-contained HTML page: text, tables and Plotly figures, light and dark, for screen and print.

A page has a title, a lead and sections; a section opens with one sentence on what to look for. Callers pass plain text,
which is escaped here; no caller writes HTML. plotly.js is embedded once, and the page's own
Content-Security-Policy forbids every network request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from residua.files import write_atomically
from residua.report import theme
from residua.report.cards import Card, cards_html, good_html
from residua.report.plain import escape, link
from residua.report.strips import Strip, Track, strips_html

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


@dataclass(frozen=True)
class Link:
    """A cell or a fact that leads somewhere: a path relative to the page, or an #anchor on it."""

    text: str
    target: str


@dataclass(frozen=True)
class Value:
    """A cell with a value and a detail (an interval, a unit), which is shown smaller below it."""

    main: str
    detail: str = ""

    def joined(self, separator: str = " ") -> str:
        """Both as plain text."""
        return f"{self.main}{separator}{self.detail}" if self.detail else self.main


Cell = str | Link | Value


@dataclass(frozen=True)
class Column:
    """A table column: its title, what it means (shown below the table), and whether it holds numbers."""

    title: str
    meaning: str = ""
    numeric: bool = True


class Section:
    """A heading, a sentence on what to look for, and the content in the order it was added."""

    def __init__(self, page: Page, title: str, look_for: str) -> None:
        self._page = page
        self._parts: list[str] = []
        self.title = title
        self.look_for = look_for
        self.anchor = page._new_anchor(title)

    def text(self, sentence: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{escape(sentence)}</p>")

    def subheading(self, title: str) -> None:
        """A heading inside the section."""
        self._parts.append(f"<h3>{escape(title)}</h3>")

    def points(self, sentences: Iterable[str]) -> None:
        """A list of sentences."""
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        self._parts.append(f"<ul>{items}</ul>")

    def note(self, sentence: str) -> None:
        """A highlighted remark: something was changed, left out or failed."""
        self._parts.append(f'<p class="note">{escape(sentence)}</p>')

    def good(self, sentence: str) -> None:
        """A green line: nothing is wrong."""
        self._parts.append(good_html(sentence))

    def cards(self, cards: Sequence[Card]) -> None:
        """Cards beside each other; nothing if there are none."""
        if cards:
            self._parts.append(cards_html(cards))

    def strips(self, tracks: Sequence[Track], strips: Sequence[Strip], caption: str, corner: str = "") -> None:
        """Models layer by layer, side by side."""
        self._parts.append(strips_html(tracks, strips, caption, corner))

    def code(self, text: str) -> None:
        """Preformatted text: a configuration, a command."""
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def facts(self, facts: Mapping[str, Cell]) -> None:
        """Names and values, side by side."""
        items = "".join(f"<div><dt>{escape(k)}</dt><dd>{_cell(v)}</dd></div>" for k, v in facts.items())
        self._parts.append(f'<dl class="facts">{items}</dl>')

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], emphasised: Iterable[int] = ()) -> None:
        """A table that scrolls sideways if needed; rows with an index in `emphasised` are highlighted."""
        strong = set(emphasised)
        kind = ["number" if column.numeric else "words" for column in columns]
        head = "".join(
            f'<th scope="col" class="{k}">{escape(column.title)}</th>' for column, k in zip(columns, kind, strict=True)
        )
        body = "".join(_row(row, kind, index in strong) for index, row in enumerate(rows))
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )
        meanings = [(column.title, column.meaning) for column in columns if column.meaning]
        if meanings:
            terms = "".join(f"<dt>{escape(title)}</dt><dd>{escape(meaning)}</dd>" for title, meaning in meanings)
            summary = "<summary>What the columns mean</summary>"
            self._parts.append(f'<details class="meanings">{summary}<dl>{terms}</dl></details>')

    def figure(self, figure: Figure, caption: str = "") -> None:
        """One interactive plot."""
        self._parts.append(f"<figure>{self._page._plot(figure)}{_caption(caption)}</figure>")

    def tabs(self, figures: Mapping[str, Figure], caption: str = "") -> None:
        """Several views; the reader sees one at a time on screen, and all of them in print."""
        group = self._page._new_anchor(f"{self.title} view")
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
                f"{self._page._plot(figure)}</div>"
            )
        bar = f'<div role="tablist" aria-label="{escape(self.title)}">{"".join(labels)}</div>'
        self._parts.append(f'<figure class="tabs">{bar}{"".join(panels)}{_caption(caption)}</figure>')

    def _html(self) -> str:
        look = f'<p class="look-for">{escape(self.look_for)}</p>' if self.look_for else ""
        return (
            f'<section id="{self.anchor}" aria-labelledby="{self.anchor}-title">'
            f'<h2 id="{self.anchor}-title">{escape(self.title)}</h2>{look}{"".join(self._parts)}</section>'
        )


class Page:
    """A report. Add sections, then `write` it."""

    def __init__(self, title: str, lead: str) -> None:
        self.title = title
        self.lead = lead
        self._sections: list[Section] = []
        self._anchors: set[str] = set()
        self._plots = 0

    def section(self, title: str, look_for: str = "") -> Section:
        """A new section at the end; `look_for` says in one sentence what to see and what healthy looks like."""
        section = Section(self, title, look_for)
        self._sections.append(section)
        return section

    def html(self) -> str:
        """The whole page as text."""
        contents = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in self._sections)
        body = "".join(section._html() for section in self._sections)
        scripts = (
            f"<script>{_plotly_js()}</script>"
            f'<script type="application/json" id="themes">{theme.templates_json()}</script>'
            if self._plots
            else ""
        )
        return _FRAME.format(
            title=escape(self.title),
            lead=escape(self.lead),
            contents=contents,
            body=body,
            style=_asset("page.css") + _asset("cards.css"),
            scripts=f"{scripts}<script>{_asset('page.js')}</script>",
        )

    def write(self, path: str | Path) -> Path:
        """Write the page atomically."""
        target = Path(path)
        write_atomically(target, self.html(), parents=True)
        return target

    def _new_anchor(self, title: str) -> str:
        words = "".join(c if c.isalnum() and c.isascii() else " " for c in title.lower()).split()
        stem = anchor = "-".join(words) or "section"
        number = 2
        while anchor in self._anchors:
            anchor, number = f"{stem}-{number}", number + 1
        self._anchors.add(anchor)
        return anchor

    def _plot(self, figure: Figure) -> str:
        self._plots += 1
        height = int(figure.layout.height or 360)
        return (
            f'<div class="plot" style="height:{height}px">'
            f'<script type="application/json">{theme.embeddable(figure.to_json())}</script></div>'
        )


def _row(cells: Sequence[Cell], kinds: Sequence[str], strong: bool) -> str:
    inner = "".join(f'<td class="{kind}">{_cell(cell)}</td>' for cell, kind in zip(cells, kinds, strict=True))
    return f'<tr class="strong">{inner}</tr>' if strong else f"<tr>{inner}</tr>"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Link):
        return f'<a href="{link(cell.target)}">{_breakable(cell.text)}</a>'
    if isinstance(cell, Value):
        return f"{_breakable(cell.main)}<small>{escape(cell.detail)}</small>" if cell.detail else _breakable(cell.main)
    return _breakable(cell)


def _breakable(text: str) -> str:
    """Long names of combined variants may continue on the next line after a +."""
    shown = escape(text)
    return f'<span class="joined">{shown.replace("+", "+<wbr>")}</span>' if "+" in shown[1:] else shown


def _caption(caption: str) -> str:
    return f"<figcaption>{escape(caption)}</figcaption>" if caption else ""


@cache
def _asset(name: str) -> str:
    return files("residua.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
<div class="columns">
<nav aria-label="Contents"><p>Contents</p><ol>{contents}</ol>
<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button></nav>
<main>{body}</main>
</div>
<footer>Made by Residua. This page is one file and needs no network.</footer>
{scripts}
</body>
</html>
"""
