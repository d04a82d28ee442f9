"""The elements of a section, as HTML: tables, cards, and strips that show a model layer by layer.

Callers pass plain text, which is escaped here. A strip is an HTML table, so it needs no script, scrolls by itself and
works with screen readers. The strips of several models appear side by side with the same columns and scales, and show
numbers only in flagged cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from residua.report.plain import escape, link

UNBROKEN = 15
"""Names of up to this many characters stay on one line."""


@dataclass(frozen=True)
class Link:
    """A cell or fact that links to a path relative to the page, or to an #anchor on it."""

    text: str
    target: str


@dataclass(frozen=True)
class Value:
    """A cell with a value and a detail (an interval, a unit) in smaller type below it.

    `key` is the number that a sortable column sorts by; the default is the number at the start of `main`.
    """

    main: str
    detail: str = ""
    key: float | None = None

    def joined(self, separator: str = " ") -> str:
        return f"{self.main}{separator}{self.detail}" if self.detail else self.main


@dataclass(frozen=True)
class Series:
    """A cell that names a series and shows its colour; hovering its row highlights the series in every figure."""

    name: str
    colour: str
    detail: str = ""


Cell = str | Link | Value | Series


@dataclass(frozen=True)
class Column:
    """A table column: its title, its meaning (shown below the table), and whether it holds numbers."""

    title: str
    meaning: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Sorted:
    """A table that can be sorted by any column; the rows are initially in the order of this one."""

    column: int
    descending: bool = True


def table(
    title: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], strong: set[int], order: Sorted | None
) -> str:
    """A table in a box that scrolls sideways if it does not fit; `title` names it for screen readers."""
    head = "".join(_head(column, index, order) for index, column in enumerate(columns))
    kinds = ["number" if column.numeric else "words" for column in columns]
    body = "".join(_row(row, kinds, index in strong) for index, row in enumerate(rows))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table: {escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def meanings(columns: Sequence[Column]) -> str:
    """A collapsed list of the columns' meanings; empty if there are none."""
    return _meanings((column.title, column.meaning) for column in columns if column.meaning)


def _meanings(terms: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{escape(title)}</dt><dd>{escape(meaning)}</dd>" for title, meaning in terms)
    summary = "<summary>What the columns mean</summary>"
    return f'<details class="meanings">{summary}<dl>{items}</dl></details>' if items else ""


def cell(content: Cell) -> str:
    """The HTML content of a cell."""
    if isinstance(content, Link):
        return f'<a href="{link(content.target)}">{breakable(content.text)}</a>'
    if isinstance(content, Series):
        dot = f'<span class="swatch" style="background:{escape(content.colour)}"></span>'
        return f"{dot}{breakable(content.name)}{_detail(content.detail)}"
    if isinstance(content, Value):
        return f"{breakable(content.main)}{_detail(content.detail)}"
    return breakable(content)


def breakable(text: str) -> str:
    """Let long variant names break after a + or an underscore."""
    shown = escape(text)
    if len(text) <= UNBROKEN or ("+" not in shown[1:] and "_" not in shown):
        return shown
    return f'<span class="joined">{shown.replace("+", "+<wbr>").replace("_", "_<wbr>")}</span>'


def _head(column: Column, index: int, order: Sorted | None) -> str:
    kind = "number" if column.numeric else "words"
    if order is None:
        return f'<th scope="col" class="{kind}">{escape(column.title)}</th>'
    way = ' aria-sort="{}"'.format("descending" if order.descending else "ascending") if index == order.column else ""
    return (
        f'<th scope="col" class="{kind}"{way}><button type="button" class="sort">{escape(column.title)}</button></th>'
    )


def _row(cells: Sequence[Cell], kinds: Sequence[str], strong: bool) -> str:
    inner = "".join(
        _table_cell(content, kind, index == 0) for index, (content, kind) in enumerate(zip(cells, kinds, strict=True))
    )
    series = next((f' data-series="{escape(c.name)}"' for c in cells if isinstance(c, Series)), "")
    return f'<tr class="strong"{series}>{inner}</tr>' if strong else f"<tr{series}>{inner}</tr>"


def _table_cell(content: Cell, kind: str, first: bool) -> str:
    key = f' data-key="{content.key!r}"' if isinstance(content, Value) and content.key is not None else ""
    if first and kind == "words":
        return f'<th scope="row" class="words"{key}>{cell(content)}</th>'
    return f'<td class="{kind}"{key}>{cell(content)}</td>'


def _detail(detail: str) -> str:
    return f"<small>{escape(detail)}</small>" if detail else ""


Tone = Literal["bad", "note", "good"]
_SIGNS: dict[Tone, tuple[str, str]] = {"bad": ("!", "Problem"), "note": ("i", "Note"), "good": ("✓", "Good")}


@dataclass(frozen=True)
class Owner:
    """One of the models that a card is about: its name and colour, where its finding is, and how certain that is."""

    name: str
    colour: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Card:
    """A title, a sentence, further `points`, and facts by name; empty facts are omitted. `more` is collapsed."""

    title: str
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tone: Tone = "bad"
    points: Sequence[str] = ()
    owners: Sequence[Owner] = ()
    more: Sequence[str] = ()


def cards_html(cards: Iterable[Card]) -> str:
    """The cards side by side, as many per row as fit."""
    return f'<div class="cards">{"".join(map(_card, cards))}</div>'


def good_html(sentence: str) -> str:
    """One green line: nothing is wrong."""
    return f'<p class="good is-good">{_sign("good")}{escape(sentence)}</p>'


def owner_html(name: str, colour: str) -> str:
    """A name with its colour."""
    return f'<span class="owner"><i style="background:{escape(colour)}"></i>{breakable(name)}</span>'


def _card(card: Card) -> str:
    items = "".join([*(f"<li>{escape(point)}</li>" for point in card.points), *map(_owner, card.owners)])
    text = f"<p>{escape(card.text)}</p>" if card.text else ""
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in card.facts.items() if v)
    return (
        f'<article class="card is-{card.tone}"><h3>{_sign(card.tone)}{escape(card.title)}</h3>{text}'
        f"{f'<ul>{items}</ul>' if items else ''}"
        f"{f'<dl>{facts}</dl>' if facts else ''}{_more(card.more)}</article>"
    )


def _owner(owner: Owner) -> str:
    detail = f"<small>{escape(owner.detail)}</small>" if owner.detail else ""
    name = owner_html(owner.name, owner.colour)
    return f'<li data-series="{escape(owner.name)}">{name} {escape(owner.text)}{detail}</li>'


def _sign(tone: Tone) -> str:
    shown, spoken = _SIGNS[tone]
    return f'<span class="sign" aria-hidden="true">{shown}</span><span class="spoken">{spoken}: </span>'


def _more(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<details><summary>{len(sentences)} more</summary><ul>{items}</ul></details>"


Flag = Literal["", "bad", "note"]
FAINT = 0.02
"""Smaller weights of a spread are not drawn."""
NARROWEST = 36
"""The narrowest visible cell of a spread is 1 / this of the spread's width."""


@dataclass(frozen=True)
class Bar:
    """One cell: bars of lengths 0 to 1 below each other (None: not measured), and the number in words.

    `mark` is a reference on the same scale, drawn as a line. With `zero`, a position from 0 to 1, bars begin at a line
    there, and negative ones extend to its left. A `flag` colours the cell; `words` is the full description shown on
    hover, which screen readers read if there is a flag.
    """

    lengths: tuple[float | None, ...]
    text: str
    mark: float | None = None
    zero: float | None = None
    flag: Flag = ""
    words: str = ""


@dataclass(frozen=True)
class Spread:
    """One cell: rows of weights, 0 to 1, over at most `width` sources; sources that a row lacks stay empty."""

    rows: tuple[tuple[float, ...], ...]
    width: int
    text: str
    flag: Flag = ""
    words: str = ""


@dataclass(frozen=True)
class Track:
    """A column: its title, its scale in words, and what it shows."""

    title: str
    scale: str
    meaning: str


@dataclass(frozen=True)
class Strip:
    """One model. `rows` from top to bottom: the row's name, and a cell for each track (None: the model has none)."""

    name: str
    colour: str
    rows: Mapping[str, Sequence[Bar | Spread | None]]


def strips_html(tracks: Sequence[Track], strips: Sequence[Strip], caption: str) -> str:
    """The strips side by side, with the meanings of the columns below."""
    head = "".join(
        f'<th scope="col">{escape(track.title)}<small>{escape(track.scale)}</small></th>' for track in tracks
    )
    shown = "".join(_strip(strip, f"<td></td>{head}", len(strips) > 1) for strip in strips)
    several = " several" if len(strips) > 1 else ""
    return (
        f'<figure class="strips{several}" role="group" aria-label="{escape(caption)}"><div class="side">{shown}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        + _meanings((track.title, f"{track.meaning} Scale: {track.scale}.") for track in tracks)
    )


def _strip(strip: Strip, head: str, named: bool) -> str:
    title = f"<caption>{owner_html(strip.name, strip.colour)}</caption>" if named else ""
    series = f' data-series="{escape(strip.name)}"' if named else ""
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>'
        for name, cells in strip.rows.items()
    )
    return (
        f'<div class="strip" style="--own:{escape(strip.colour)}" tabindex="0" role="region" '
        f'aria-label="{escape(strip.name)}, layer by layer"{series}><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Bar | Spread | None) -> str:
    if cell is None:
        return '<td class="missing"><span>—</span></td>'
    drawn = _bars(cell) if isinstance(cell, Bar) else _spread(cell)
    spoken = f'<span class="spoken"> ({escape(cell.words)})</span>' if cell.flag else ""
    title = f' title="{escape(cell.words)}"' if cell.words else ""
    kind = f' class="is-{cell.flag}"' if cell.flag else ""
    return f"<td{kind}{title}><div>{drawn}<span>{escape(cell.text)}{spoken}</span></div></td>"


def _bars(bar: Bar) -> str:
    mark = "" if bar.mark is None else f'<u style="left:{_percent(bar.mark)}"></u>'
    zero = "" if bar.zero is None else f'<u class="zero" style="left:{_percent(bar.zero)}"></u>'
    drawn = "".join(
        '<b class="missing"></b>' if length is None else f'<b style="{_extent(length, bar.zero)}"></b>'
        for length in bar.lengths
    )
    return f'<div class="rail" aria-hidden="true">{drawn}{mark}{zero}</div>'


def _extent(length: float, zero: float | None) -> str:
    """The start and the width of a bar."""
    if zero is None:
        return f"width:{_percent(length)}"
    return f"margin-left:{_percent(zero + min(length, 0.0))};width:{_percent(abs(length))}"


def _spread(spread: Spread) -> str:
    """Draw rows of small rectangles; the picture stretches with its cell."""
    paper = "".join(
        f'<rect class="paper" y="{y}" width="{len(row)}" height=".86"/>' for y, row in enumerate(spread.rows)
    )
    wide = max(1.0, spread.width / NARROWEST)
    cells = "".join(
        f'<rect x="{x}" y="{y}" width="{wide:.3g}" height=".86" fill-opacity="{min(weight, 1) ** 0.5:.2f}"/>'
        for y, row in enumerate(spread.rows)
        for x, weight in enumerate(row)
        if weight >= FAINT
    )
    view = f'viewBox="0 0 {spread.width} {len(spread.rows)}" preserveAspectRatio="none"'
    return f'<svg class="rail" {view} aria-hidden="true">{paper}{cells}</svg>'


def _percent(share: float) -> str:
    return f"{100 * min(max(share, 0.0), 1.0):.3g}%"
