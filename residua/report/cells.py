"""Table cells and tables as HTML. Callers pass plain text, which is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from residua.report.plain import escape, link

UNBROKEN = 15
"""Names of at most so many letters stay on one line."""


@dataclass(frozen=True)
class Link:
    """A cell or a fact that leads somewhere: a path relative to the page, or an #anchor on it."""

    text: str
    target: str


@dataclass(frozen=True)
class Value:
    """A cell with a value and a detail (an interval, a unit), which is shown smaller below it.

    `key` is the number that a sortable column sorts by; without it, the number that `main` begins with.
    """

    main: str
    detail: str = ""
    key: float | None = None

    def joined(self, separator: str = " ") -> str:
        """Both as plain text."""
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
    """A table column: its title, what it means (shown below the table), and whether it holds numbers."""

    title: str
    meaning: str = ""
    numeric: bool = True


@dataclass(frozen=True)
class Sorted:
    """A table whose columns can be sorted: the rows come in the order of this column."""

    column: int
    descending: bool = True


def table(
    title: str, columns: Sequence[Column], rows: Iterable[Sequence[Cell]], strong: set[int], order: Sorted | None
) -> str:
    """A table in a box that scrolls sideways where it does not fit; `title` names it for screen readers."""
    head = "".join(_head(column, index, order) for index, column in enumerate(columns))
    kinds = ["number" if column.numeric else "words" for column in columns]
    body = "".join(_row(row, kinds, index in strong) for index, row in enumerate(rows))
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="Table: {escape(title)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def meanings(columns: Sequence[Column]) -> str:
    """What the columns mean, folded; empty if no column says."""
    terms = "".join(
        f"<dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd>" for column in columns if column.meaning
    )
    summary = "<summary>What the columns mean</summary>"
    return f'<details class="meanings">{summary}<dl>{terms}</dl></details>' if terms else ""


def cell(content: Cell) -> str:
    """The inside of a cell."""
    if isinstance(content, Link):
        return f'<a href="{link(content.target)}">{breakable(content.text)}</a>'
    if isinstance(content, Series):
        dot = f'<span class="swatch" style="background:{escape(content.colour)}"></span>'
        return f"{dot}{breakable(content.name)}{_detail(content.detail)}"
    if isinstance(content, Value):
        return f"{breakable(content.main)}{_detail(content.detail)}"
    return breakable(content)


def breakable(text: str) -> str:
    """Long names of variants may continue on the next line after a + or an underscore."""
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
        _cell(content, kind, index == 0) for index, (content, kind) in enumerate(zip(cells, kinds, strict=True))
    )
    series = next((f' data-series="{escape(c.name)}"' for c in cells if isinstance(c, Series)), "")
    return f'<tr class="strong"{series}>{inner}</tr>' if strong else f"<tr{series}>{inner}</tr>"


def _cell(content: Cell, kind: str, first: bool) -> str:
    key = f' data-key="{content.key!r}"' if isinstance(content, Value) and content.key is not None else ""
    if first and kind == "words":
        return f'<th scope="row" class="words"{key}>{cell(content)}</th>'
    return f'<td class="{kind}"{key}>{cell(content)}</td>'


def _detail(detail: str) -> str:
    return f"<small>{escape(detail)}</small>" if detail else ""
