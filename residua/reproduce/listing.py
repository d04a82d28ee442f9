"""The list of all entries: on a terminal with their cost on this device, and as the table of docs/reproduce.md."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

from residua.report import Column, Value
from residua.reproduce.build import Cost, estimated_cost
from residua.reproduce.catalogue import DOCUMENTS, load, names
from residua.reproduce.conduct import hours_shown, training_rate
from residua.reproduce.entry import Inside, Nothing, Study
from residua.reproduce.scale import sentence
from residua.study.sentences import NONE, count
from residua.study.tables import markdown_table

KINDS = {"study": "study", "inside": "inside a model", "none": "no"}
NEEDS_MODELS = "--run FOLDER"


def print_list(console: Console, scale: Fraction) -> None:
    """One line for each entry: what it shows, and what it costs as published and at `scale`."""
    rate = training_rate()
    for document, title in DOCUMENTS.items():
        table = Table(box=None, header_style="bold", pad_edge=False, title=f"{document}: {title}", title_justify="left")
        table.add_column("entry", no_wrap=True)
        table.add_column("kind", no_wrap=True)
        table.add_column("what", no_wrap=True, overflow="ellipsis", ratio=1)
        table.add_column("as published", no_wrap=True)
        table.add_column(f"at {scale}", no_wrap=True)
        for name in names():
            if name.startswith(document):
                entry = load(name)
                told = [_cost(entry, at, rate) for at in (Fraction(1), scale)]
                table.add_row(name, KINDS[entry.kind], Text(_what(entry)), *map(Text, told))
        console.print(table)
        console.print()
    console.print(Text(sentence(scale)), soft_wrap=True)
    console.print("Next: residua reproduce ENTRY --plan; docs/reproduce.md says what every entry measures.")


def _what(entry: Study | Inside | Nothing) -> str:
    return f"{entry.title}. {entry.reason}: {entry.nearest}" if isinstance(entry, Nothing) else entry.title


def _cost(entry: Study | Inside | Nothing, scale: Fraction, rate: float) -> str:
    if isinstance(entry, Nothing):
        return ""
    if not entry.trains:
        return NEEDS_MODELS
    cost = estimated_cost(entry, scale)
    return f"{_short(cost)}, {hours_shown(cost.flops / rate)}"


def _short(cost: Cost) -> str:
    return f"{cost.runs} runs, {count(cost.tokens)} tokens, {cost.flops:.1e} FLOPs"


def markdown_list(scale: Fraction) -> str:
    """The tables of docs/reproduce.md, one per document; without hours, which depend on the device."""
    columns = [Column(title, numeric=False) for title in ("entry", "what", "how", "as published", f"at {scale}")]
    parts = []
    for document, title in DOCUMENTS.items():
        parts += [f"### {document}: {title}", ""]
        rows = [_row(name, scale) for name in names() if name.startswith(document)]
        parts += [*markdown_table(columns, rows), ""]
    return "\n".join(parts)


def _row(name: str, scale: Fraction) -> list[Value]:
    entry = load(name)
    if isinstance(entry, Nothing):
        return [Value(name), Value(entry.title), Value(f"no: {entry.reason}. Nearest: {entry.nearest}"),
                Value(NONE), Value(NONE)]  # fmt: skip
    how = KINDS[entry.kind]
    if isinstance(entry, Inside):
        how = f"{how}: {', '.join(entry.shows)}" + (f". {entry.missing}" if entry.missing else "")
    if not entry.trains:
        return [Value(name), Value(entry.title), Value(how), Value(NEEDS_MODELS), Value(NEEDS_MODELS)]
    costs = [Value(_short(estimated_cost(entry, at))) for at in (Fraction(1), scale)]
    return [Value(name), Value(entry.title), Value(how), *costs]
