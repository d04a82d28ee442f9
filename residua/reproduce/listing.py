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
