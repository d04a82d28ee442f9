"""The list of all entries: on a terminal with their cost on this device, and as the table of docs/reproduce.md."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console
from rich.text import Text

from residua.reading import counted
from residua.report import Column, Value
from residua.report.tables import markdown_table
from residua.reproduce.entry import DOCUMENTS, Inside, Nothing, Study, load, names
from residua.reproduce.request import Cost, estimated_cost
from residua.reproduce.run_entry import duration, training_rate
from residua.reproduce.scale import sentence
from residua.study.statistics import count
from residua.study.tables import NONE

KINDS = {"study": "study", "inside": "inside a model", "none": "no"}
NEEDS_MODELS = "--run FOLDER"
COST_WIDTH = 52  # characters


def print_list(console: Console, scale: Fraction) -> None:
    """One line for each entry: its cost as published and at `scale`, and its result."""
    rate = training_rate()
    for document, title in DOCUMENTS.items():
        console.print(Text(f"{document}: {title}", style="bold"), soft_wrap=True)
        _line(console, "entry", "runs", f"{'as published':<{COST_WIDTH}}{f'at {scale}':<{COST_WIDTH}}", "what")
        for name in names():
            if name.startswith(document):
                _line(console, name, *_cells(load(name), scale, rate))
        console.print()
    console.print(Text(sentence(scale)), soft_wrap=True)
    console.print("Next: residua reproduce ENTRY --plan; docs/reproduce.md says how.", soft_wrap=True)


def _line(console: Console, name: str, runs: str, costs: str, what: str) -> None:
    line = Text(f"{name:<11} {runs:>5}  {costs:<{2 * COST_WIDTH}}{what}")
    if console.is_terminal:
        console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
    else:
        console.print(line, soft_wrap=True, highlight=False)


def _cells(entry: Study | Inside | Nothing, scale: Fraction, rate: float) -> tuple[str, str, str]:
    """Runs, their cost as published and at the scale, and the title of the entry."""
    if isinstance(entry, Nothing):
        return "", f"no: {entry.reason}", f"{entry.title}. Nearest: {entry.nearest}"
    if not entry.trains:
        return "", NEEDS_MODELS, entry.title
    costs = [estimated_cost(entry, at) for at in (Fraction(1), scale)]
    texts = [f"{count(cost.tokens)} tokens, {cost.flops:.1e} FLOPs, {duration(cost.flops / rate)}" for cost in costs]
    return str(costs[0].runs), "".join(f"{text:<{COST_WIDTH}}" for text in texts), entry.title


def _short(cost: Cost) -> str:
    return f"{counted(cost.runs, 'run')}, {count(cost.tokens)} tokens, {cost.flops:.1e} FLOPs"


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
