"""Write the list of `residua reproduce` into docs/reproduce.md, between its two marks: `make entries`."""

from __future__ import annotations

from collections import Counter
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
    """The lists of docs/reproduce.md: entries that can be run, by document, and why most of the rest cannot."""
    columns = [Column(title, numeric=False) for title in ("entry", "what", "runs")]
    parts = []
    for document, title in DOCUMENTS.items():
        rows = [[Value(name), Value(entry.title), Value(_runs(entry))] for name, entry in by_use(document).items()]
        parts += [f"### {document}: {title}", "", *markdown_table(columns, rows), ""]
    reasons = Counter(entry.reason for name in names() if isinstance(entry := load(name), Nothing))
    most = [f"{reason} ({count})" for reason, count in reasons.most_common(3)]
    line = f"{reasons.total()} figures and tables, most of them {most[0]}, {most[1]} or {most[2]}."
    return "\n".join([*parts, "### Not available", "", plain.markdown(line)]) + "\n"


def _runs(entry: Study | Inside) -> str:
    return str(estimated_cost(entry, Fraction(1, 32)).runs) if entry.trains else NEEDS_MODELS


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown_list()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
