"""Write the table of `residua reproduce` into docs/reproduce.md, between its two marks: `make entries`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from residua.report import Column, Value, plain
from residua.report.tables import markdown_table
from residua.reproduce.entry import DOCUMENTS, Nothing, load, names
from residua.reproduce.run_entry import NEEDS_MODELS, by_use

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BEGIN, END = "<!-- entries: written by `make entries` -->\n", "<!-- end of entries -->\n"


def markdown_list() -> str:
    """The table of docs/reproduce.md: each document's entries that can be run, and why most of the rest cannot."""
    titles = ("document", "title", "entries", f"{NEEDS_MODELS} only")
    columns = [Column(title, numeric=False) for title in titles]
    rows = [[Value(document), Value(title), *_cells(document)] for document, title in DOCUMENTS.items()]
    reasons = Counter(entry.reason for name in names() if isinstance(entry := load(name), Nothing))
    most = [f"{reason} ({count})" for reason, count in reasons.most_common(3)]
    line = f"{reasons.total()} more cannot be run, most of them {most[0]}, {most[1]} or {most[2]}."
    return "\n".join([*markdown_table(columns, rows), "", plain.markdown(line)]) + "\n"


def _cells(document: str) -> list[Value]:
    """The tables and figures of a document that train, and those that need a model of the reader's."""
    trains = {name.partition(":")[2]: entry.trains for name, entry in by_use(document).items()}
    return [Value(", ".join(name for name, does in trains.items() if does is column)) for column in (True, False)]


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown_list()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
