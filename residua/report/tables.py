"""Tables as data, for pages, Markdown and terminals.

On a narrow terminal, columns are dropped, cells wrap, or rows become paragraphs; no text is truncated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import indent
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from residua.report import plain
from residua.report.elements import Column, Value

Cells = list[list[str]]
_UNBOUNDED = 10_000


class DataTable(NamedTuple):
    """Columns and rows; `look_for` says what is healthy, for the page."""

    title: str
    columns: list[Column]
    rows: list[list[Value]]
    look_for: str = ""

    @classmethod
    def of(cls, title: str, look_for: str, *columns: tuple[Column, Iterable[Value]]) -> DataTable | None:
        """Build a table from columns, each with its cells; None if they are empty."""
        rows = [list(row) for row in zip(*(cells for _, cells in columns), strict=True)]
        return cls(title, [column for column, _ in columns], rows, look_for) if rows else None

    def without(self, titles: Sequence[str]) -> DataTable:
        """The table without the columns of these titles."""
        kept = [index for index, column in enumerate(self.columns) if column.title not in titles]
        rows = [[row[index] for index in kept] for row in self.rows]
        return self._replace(columns=[self.columns[index] for index in kept], rows=rows)

    def markdown(self) -> list[str]:
        """The table as lines of Markdown, without the title."""
        return markdown_table(self.columns, self.rows)

    def print(self, console: Console, spared: Sequence[str] = ()) -> None:
        """Print the table. If it is too wide, drop `spared` columns in order; if that is not enough, wrap cells."""
        unbounded = console.options.update(width=_UNBOUNDED)
        for dropped in range(len(spared) + 1):
            table = self.without(spared[:dropped])
            cells = [[_head(column.title) for column in table.columns]]
            cells += ([cell.joined("\n") for cell in row] for row in table.rows)
            drawn = _drawn(table, cells)
            excess = Measurement.get(console, unbounded, drawn).maximum - console.width
            if excess <= 0:
                break
        else:
            drawn = _drawn(table, *narrowed(cells, [column.numeric for column in table.columns], excess))
        console.print(drawn)


def _head(title: str) -> str:
    """Split a long title into two lines."""
    return title.replace(" ", "\n", 1) if len(title) > 14 else title


def _drawn(of: DataTable, cells: Cells, widths: Sequence[int] | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=of.title, title_justify="left", title_style="bold")
    for index, column in enumerate(of.columns):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        width = None if widths is None else widths[index]
        table.add_column(cells[0][index], justify=justify, no_wrap=widths is None, overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return table


def markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> list[str]:
    """A table as lines of Markdown."""
    head = "| " + " | ".join(plain.markdown(column.title) for column in columns) + " |"
    rule = "|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|"
    return [head, rule, *("| " + " | ".join(plain.markdown(cell.joined()) for cell in row) + " |" for row in rows)]


class FittingTable(Table):
    """A Rich table that is not truncated on a narrow terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table normally; if it does not fit, with narrower columns; if words do not fit, row by row."""
        excess = self.__rich_measure__(console, options.update(width=_UNBOUNDED)).maximum - options.max_width
        if excess <= 0:
            yield from super().__rich_console__(console, options)
            return
        columns = [[str(cell) for cell in (column.header, *column.cells)] for column in self.columns]
        numeric = [column.justify == "right" for column in self.columns]
        cells = [list(row) for row in zip(*columns, strict=True)]
        if excess <= sum(_widths(cells)) - sum(_least(cells, numeric)):
            yield self._narrower(*narrowed(cells, numeric, excess))
        else:
            yield from _paragraphs(cells, numeric, options.max_width)

    def _narrower(self, cells: Cells, widths: Sequence[int]) -> Table:
        table = Table(header_style=self.header_style, box=self.box)
        for head, column, width in zip(cells[0], self.columns, widths, strict=True):
            table.add_column(head, justify=column.justify, width=width)
        for row, source_row in zip(cells[1:], self.rows, strict=True):
            table.add_row(*row, style=source_row.style)
        return table


def narrowed(cells: Cells, numeric: Sequence[bool], excess: int) -> tuple[Cells, list[int]]:
    """Narrow the widest columns by `excess` in total; returns the cells, in rows, and the columns' widths.

    A column fits its longest word if possible; otherwise words break.
    """
    widths, least = _widths(cells), _least(cells, numeric)
    for _ in range(excess):
        roomy = [index for index, width in enumerate(widths) if width > least[index]] or range(len(widths))
        widest = max(roomy, key=widths.__getitem__)
        widths[widest] = max(1, widths[widest] - 1)
    filled = [[_filled(*cell) for cell in zip(row, map(_breaks, numeric), widths, strict=True)] for row in cells]
    return filled, widths


def _breaks(numeric: bool) -> str:
    """Where a cell may break: at spaces and after `_`; numbers also after `–`, names also after `+`."""
    return r" (?!%)|(?<=[–_])" if numeric else r" |(?<=[+_])"


def _widths(cells: Cells) -> list[int]:
    return [max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*cells, strict=True)]


def _least(cells: Cells, numeric: Sequence[bool]) -> list[int]:
    """The length of the longest word of each column."""
    columns = zip(zip(*cells, strict=True), map(_breaks, numeric), strict=True)
    return [max(len(word) for cell in column for word in re.split(rf"\n|{at}", cell)) for column, at in columns]


def _filled(cell: str, breaks: str, width: int) -> str:
    """Wrap the text to `width` characters where it may break."""
    lines = []
    for line in cell.split("\n"):
        filled = ""
        for part in re.split(f"({breaks})", line):
            if filled and len(filled + part.rstrip()) > width:
                lines.append(filled.rstrip())
                filled = ""
            filled += part if filled or part.strip() else ""
        lines.append(filled.rstrip())
    return "\n".join(lines)


def _paragraphs(cells: Cells, numeric: Sequence[bool], width: int) -> Iterator[Text]:
    """Each row as its names, then its numbers with their column titles."""
    heads, *rows = cells
    for row in rows:
        yield Text(" ".join(cell for cell, number in zip(row, numeric, strict=True) if cell and not number), "bold")
        numbers = [f"{head} {cell}" for head, cell, number in zip(heads, row, numeric, strict=True) if cell and number]
        yield Text(indent(_filled(", ".join(numbers), r"(?<=,) ", width - 2), "  "))
