"""A model as a picture: its layers from bottom to top, one row each, several quantities beside each other.

A strip is an HTML table, so it needs no script, scrolls within itself and can be read aloud. The strips of several
models stand side by side with the same columns and the same scales, and show the numbers of flagged cells only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from residua.report.cards import owner_html
from residua.report.plain import escape

Flag = Literal["", "bad", "note"]
FAINT = 0.02
"""A smaller weight of a spread is not drawn."""
NARROWEST = 36
"""A cell of a spread is at least this part of its width, so that it can be seen."""


@dataclass(frozen=True)
class Bar:
    """One cell: bars of lengths 0 to 1 below each other (None: not measured), and the number in words.

    `mark` is a reference on the same scale, drawn as a line. With `zero`, a place from 0 to 1, bars begin at a line
    there, and negative ones go to its left. A `flag` colours the cell; `words` say it all, under the pointer, and are
    read aloud where there is a flag.
    """

    lengths: tuple[float | None, ...]
    text: str
    mark: float | None = None
    zero: float | None = None
    flag: Flag = ""
    words: str = ""


@dataclass(frozen=True)
class Spread:
    """One cell: rows of weights, 0 to 1, over at most `width` sources; sources that a row does not have stay empty."""

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
    """The strips side by side, and below them what the columns mean."""
    head = "".join(
        f'<th scope="col">{escape(track.title)}<small>{escape(track.scale)}</small></th>' for track in tracks
    )
    shown = "".join(_strip(strip, f"<td></td>{head}", len(strips) > 1) for strip in strips)
    terms = "".join(
        f"<dt>{escape(track.title)}</dt><dd>{escape(track.meaning)} Scale: {escape(track.scale)}.</dd>"
        for track in tracks
    )
    several = " several" if len(strips) > 1 else ""
    return (
        f'<figure class="strips{several}" role="group" aria-label="{escape(caption)}"><div class="side">{shown}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        f'<details class="meanings"><summary>What the columns mean</summary><dl>{terms}</dl></details>'
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
    """Where a bar begins and how wide it is."""
    if zero is None:
        return f"width:{_percent(length)}"
    return f"margin-left:{_percent(zero + min(length, 0.0))};width:{_percent(abs(length))}"


def _spread(spread: Spread) -> str:
    """Rows of small rectangles; the picture stretches with its cell."""
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
