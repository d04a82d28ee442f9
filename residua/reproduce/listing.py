"""The list of all entries, with their cost on this device."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console
from rich.text import Text

from residua.reproduce.entry import DOCUMENTS, Inside, Nothing, Study, load, names
from residua.reproduce.request import estimated_cost
from residua.reproduce.run_entry import duration, training_rate
from residua.reproduce.scale import sentence
from residua.study.statistics import count

NEEDS_MODELS = "--run FOLDER"
COST_WIDTH = 52  # characters


def by_use(document: str) -> list[str]:
    """A document's entries, those that train first, then those that look at a person's models."""

    def place(name: str) -> int:
        entry = load(name)
        return 2 if isinstance(entry, Nothing) else 0 if entry.trains else 1

    return sorted((name for name in names() if name.startswith(document)), key=place)


def print_list(console: Console, scale: Fraction) -> None:
    """One line for each entry: its runs, their cost at `scale`, and its title."""
    rate = training_rate()
    for document, title in DOCUMENTS.items():
        console.print(Text(f"{document}: {title}", style="bold"), soft_wrap=True)
        _line(console, "entry", "runs", f"{f'at {scale}':<{COST_WIDTH}}", "what")
        for name in by_use(document):
            _line(console, name, *_cells(load(name), scale, rate))
        console.print()
    console.print(Text(sentence(scale)), soft_wrap=True)
    console.print(
        "Next: residua reproduce ENTRY --demo, in minutes; or --plan. docs/reproduce.md says how.", soft_wrap=True
    )


def _line(console: Console, name: str, runs: str, cost: str, what: str) -> None:
    line = Text(f"{name:<11} {runs:>5}  {cost:<{COST_WIDTH}}{what}")
    if console.is_terminal:
        console.print(line, no_wrap=True, overflow="ellipsis", highlight=False)
    else:
        console.print(line, soft_wrap=True, highlight=False)


def _cells(entry: Study | Inside | Nothing, scale: Fraction, rate: float) -> tuple[str, str, str]:
    """Runs, their cost at the scale, and the title of the entry."""
    if isinstance(entry, Nothing):
        return "", f"no: {entry.reason}", f"{entry.title}. Nearest: {entry.nearest}"
    if not entry.trains:
        return "", NEEDS_MODELS, entry.title
    cost = estimated_cost(entry, scale)
    text = f"{count(cost.tokens)} tokens, {cost.flops:.1e} FLOPs, {duration(cost.flops / rate)}"
    return str(cost.runs), f"{text:<{COST_WIDTH}}", entry.title
