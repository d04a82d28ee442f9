"""Write the list of `residua reproduce` into docs/reproduce.md, between its two marks: `make entries`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from residua.reproduce.listing import markdown_list

PAGE = Path(__file__).parents[1] / "docs" / "reproduce.md"
BEGIN, END = "<!-- entries: written by `make entries` -->\n", "<!-- end of entries -->\n"


def main() -> None:
    """Replace what stands between the marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{markdown_list(Fraction(1, 32))}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
