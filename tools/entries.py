"""Write the list of `residua reproduce` into docs/reproduce.md, between its two marks: `make entries`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from residua.reading import counted
from residua.report import Column, Value
from residua.report.tables import markdown_table
from residua.reproduce.entry import DOCUMENTS, Inside, Nothing, load, names
from residua.reproduce.listing import NEEDS_MODELS
from residua.reproduce.request import Cost, estimated_cost
from residua.study.statistics import count
from residua.study.tables import NONE

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BEGIN, END = "<!-- entries: written by `make entries` -->\n", "<!-- end of entries -->\n"


def _short(cost: Cost) -> str:
    return f"{counted(cost.runs, 'run')}, {count(cost.tokens)} tokens, {cost.flops:.1e} FLOPs"


def markdown_list(scale: Fraction) -> str:
    """The tables of the page, one per document; without hours, which depend on the device."""
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
    how = "study"
    if isinstance(entry, Inside):
        how = f"inside a model: {', '.join(entry.shows)}" + (f". {entry.missing}" if entry.missing else "")
    if not entry.trains:
        return [Value(name), Value(entry.title), Value(how), Value(NEEDS_MODELS), Value(NEEDS_MODELS)]
    costs = [Value(_short(estimated_cost(entry, at))) for at in (Fraction(1), scale)]
    return [Value(name), Value(entry.title), Value(how), *costs]


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown_list(Fraction(1, 32))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
