"""A section of a page: text, tables, cards, folds and figures, in the order they are added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from residua.report import theme
from residua.report.elements import (
    Card,
    Cell,
    Column,
    Sorted,
    Strip,
    Track,
    cards_html,
    cell,
    good_html,
    meanings,
    strips_html,
    table,
)
from residua.report.figures import Figure
from residua.report.legend import legend, words
from residua.report.plain import escape

Tone = Literal["", "good", "bad", "unsure"]
"""Good news is green, bad news red, an unclear result yellow; a word next to it always says the same."""


@dataclass(frozen=True)
class Picture:
    """A figure with a title above it and a caption below."""

    figure: Figure
    title: str = ""
    caption: str = ""


class Section:
    """A heading, a sentence on what to look for, and the content in the order it was added."""

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
        """One sentence that matters, set larger."""
        self._parts.append(f'<p class="verdict" data-tone="{tone}">{escape(sentence)}</p>')

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
        """What is added inside the `with` block is hidden until the reader opens it; on paper it is open."""
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

        With `order`, the reader can sort by any column; it names the one that the rows are sorted by.
        """
        self._parts.append(table(self.title, columns, rows, set(emphasised), order))
        self._parts.append(meanings(columns))

    def figure(self, figure: Figure, caption: str = "") -> None:
        """One interactive plot, with its axes and values in words for a screen reader."""
        self._parts.append(self._figure(Picture(figure, "", caption)))

    def beside(self, *pictures: Picture) -> None:
        """Plots side by side where there is room, else below each other."""
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
        """Places for plots of a live page, side by side: name, then title and caption. Hidden until they are filled."""
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
        """The section."""
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
