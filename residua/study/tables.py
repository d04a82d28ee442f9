"""The study's tables on a terminal and in Markdown, with the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from residua.report import Column, Value, plain
from residua.report.fitting import Cells, narrowed
from residua.study import entries, sentences
from residua.study.answer import comparisons_sentence
from residua.study.results import StudyResult
from residua.study.side_tables import rate_sentence, side_tables
from residua.study.verdict import verdict

SPARED = ("training loss", "bits/byte", "memory", "parameters")  # columns that a narrow terminal drops, in this order


def print_study(console: Console, result: StudyResult) -> None:
    """Table, verdicts and warnings on a terminal."""
    for title, columns, rows in _tables(result):
        console.print(_fitting(console, title, columns, rows))
    for sentence in _sentences(result):
        console.print(Text(f"• {sentence}"))


def _fitting(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> Table:
    """The table with as many columns as fit the terminal; on a narrow one, cells wrap at spaces."""
    unbounded = console.options.update(width=10_000)
    without = _spared(columns)
    for count in range(len(without) + 1):
        table = _table(title, *_kept(columns, rows, without[:count]))
        if (wide := Measurement.get(console, unbounded, table).maximum) <= console.width:
            return table
    kept, cells = _kept(columns, rows, without)
    return _table(title, kept, *narrowed(cells, [column.numeric for column in kept], wide - console.width))


def _spared(columns: Sequence[Column]) -> list[str]:
    """The columns that a narrow terminal drops, in this order: with a ladder, also the gain that it replaces.

    What the correction makes of a gain is in its sentence as well.
    """
    laddered = any(column.title == entries.EQUIVALENT.title for column in columns)
    return [*SPARED, *(["step-wise gain"] if laddered else []), entries.TEXT_ERROR.title, entries.PAYS]


def _kept(
    columns: Sequence[Column], rows: Sequence[Sequence[Value]], without: Sequence[str]
) -> tuple[list[Column], Cells]:
    """The columns that stay, and their cells with details on a line of their own, the heads first."""
    kept = [index for index, column in enumerate(columns) if column.title not in without]
    heads = [columns[index].title for index in kept]
    split = [head.replace(" ", "\n", 1) if len(head) > 14 else head for head in heads]
    return [columns[index] for index in kept], [split, *([row[index].joined("\n") for index in kept] for row in rows)]


def _table(title: str, columns: Sequence[Column], cells: Cells, widths: Sequence[int] | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        width = None if widths is None else widths[index]
        table.add_column(cells[0][index], justify=justify, no_wrap=widths is None, overflow="fold", width=width)
    for row in cells[1:]:
        table.add_row(*map(Text, row))
    return table


def markdown(result: StudyResult) -> str:
    """The same, as a Markdown page."""
    parts = [f"# {plain.markdown(result.name)}", "", *markdown_tables(result), ""]
    parts += [f"- {plain.markdown(sentence, begins=True)}" for sentence in _sentences(result)]
    inside = [f"[{plain.markdown(run.folder)}]({plain.link(run.diagnosis)})" for run in result.runs if run.diagnosis]
    parts += [f"- Diagnoses: {', '.join(inside)}."] if inside else []
    meanings = [column for column in entries.columns(result) if column.meaning]
    parts += ["", "Columns:", "", *(f"- **{column.title}**: {column.meaning}." for column in meanings)]
    return "\n".join(parts) + "\n"


def markdown_tables(result: StudyResult) -> list[str]:
    """The tables alone, as lines of Markdown."""
    parts: list[str] = []
    for title, columns, rows in _tables(result):
        parts += [*([""] if parts else []), *([f"## {plain.markdown(title)}", ""] if title else [])]
        parts += markdown_table(columns, rows)
    return parts


def _tables(result: StudyResult) -> list[tuple[str, list[Column], list[list[Value]]]]:
    """Title, columns and cells of every table: one per size, and the fits."""
    several = len(result.sizes) > 1
    found = [
        (
            f"size {size}" if several else "",
            entries.columns(result),
            [entries.cells(row, result) for row in result.rows(size)],
        )
        for size in result.sizes
    ]
    for size in result.sizes:
        low = [row for row in result.rows(size) if row.low_precision is not None]
        if low and low[0].low_precision is not None:
            title = f"low precision, size {size}" if several else "low precision"
            columns = entries.precision_columns(list(low[0].low_precision.losses))
            found.append((title, columns, [entries.precision_cells(row) for row in low]))
    found += [
        (f"{table.title}, size {size}" if several else table.title, table.columns, table.rows)
        for size in result.sizes
        for table in side_tables(result, size)
    ]
    if result.scaling:
        fits = [entries.scaling_cells(row, result.baseline) for row in result.scaling]
        found.append(("compute scaling", entries.scaling_columns(result.confidence), fits))
    return found


def _sentences(result: StudyResult) -> list[str]:
    verdicts = [verdict(row, result) for row in result.rows(result.sizes[-1]) if row.name != result.baseline]
    failed = [f"{run.folder} did not complete: {run.problem}" for run in result.runs if run.status == "failed"]
    about = [sentences.validation_sentence(result), *sentences.text_sentences(result)]
    facts = [said for said in (*about, sentences.dataset_sentence(result)) if said]
    warnings = [said for said in (sentences.seeds_sentence(result), sentences.side_by_side_sentence(result)) if said]
    rates = [rate_sentence(rate, len(result.sizes) > 1) for rate in result.tuning]
    told = [*warnings, *sentences.ladder_sentences(result), *sentences.lacking_sentences(result)]
    compared = [said] if (said := comparisons_sentence(result)) else []
    return [*facts, *sentences.matching_sentences(result), *rates, *verdicts, *compared, *told, *failed]


def markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[Value]]) -> list[str]:
    """A table as lines of Markdown."""
    head = "| " + " | ".join(plain.markdown(column.title) for column in columns) + " |"
    rule = "|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|"
    return [head, rule, *("| " + " | ".join(plain.markdown(cell.joined()) for cell in row) + " |" for row in rows)]
