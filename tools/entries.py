"""Write the list of `residua reproduce` into docs/reproduce.md, between its two marks: `make entries`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from residua.report import Column, Value, plain
from residua.report.tables import markdown_table
from residua.reproduce.entry import DOCUMENTS, Inside, Nothing, Study, load, names
from residua.reproduce.request import estimated_cost
from residua.reproduce.run_entry import NEEDS_MODELS, by_use

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BEGIN, END = "<!-- entries: written by `make entries` -->\n", "<!-- end of entries -->\n"


def markdown_list() -> str:
    """The lists of docs/reproduce.md: entries that can be run, by document, and the rest by the reason."""
    columns = [Column(title, numeric=False) for title in ("entry", "what", "runs")]
    parts = []
    for document, title in DOCUMENTS.items():
        entries = {name: entry for name in by_use(document) if not isinstance(entry := load(name), Nothing)}
        rows = [[Value(name), Value(entry.title), Value(_runs(entry))] for name, entry in entries.items()]
        parts += [f"### {document}: {title}", "", *markdown_table(columns, rows), ""]
    parts += ["### Not available", ""]
    reasons: dict[str, list[str]] = {}
    for name in names():
        if isinstance(entry := load(name), Nothing):
            reasons.setdefault(entry.reason, []).append(name)
    lines = (f"- {reason[0].upper()}{reason[1:]}: {', '.join(listed)}." for reason, listed in reasons.items())
    return "\n".join([*parts, *map(plain.markdown, lines)]) + "\n"


def _runs(entry: Study | Inside) -> str:
    return str(estimated_cost(entry, Fraction(1, 32)).runs) if entry.trains else NEEDS_MODELS


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown_list()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
