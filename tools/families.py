"""Write the table of docs/reference/families.md: `python tools/families.py` (transformers must be installed).

A family is described by the docstring of its class. Its difference is the largest between the logits of transformers
and ours, in float32, over the tiny random models of tests/convert/tiny.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from residua.convert.families import FAMILIES  # noqa: E402
from residua.storage.load import load  # noqa: E402
from tests.convert import tiny  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "families.md"
BEGIN, END = "<!-- families: made by tools/families.py -->\n", "<!-- end of families -->\n"


def describe() -> Iterator[tuple[str, str, str]]:
    """Each `model_type`, the models that have it, and what they are beyond Llama."""
    for model_type, family in FAMILIES.items():
        models, _, rest = (family.__doc__ or "").splitlines()[0].rstrip(".").partition(": ")
        yield model_type, models, rest


def differences(names: Iterable[str] = tiny.FAMILIES) -> dict[str, float]:
    """The largest difference of logits by `model_type`, over these models of tests/convert/tiny.py."""
    largest: dict[str, float] = {}
    for architecture, keys in map(tiny.FAMILIES.__getitem__, names):
        with tempfile.TemporaryDirectory() as folder:
            theirs = tiny.saved(Path(folder), architecture, **keys)
            ours = tiny.logits(load(Path(folder)), tiny.tokens())
            difference = (ours - tiny.logits(theirs, tiny.tokens())).abs().max().item()
        name = theirs.config.model_type
        largest[name] = max(difference, largest.get(name, 0.0))
    return largest


def rows(measured: Mapping[str, float]) -> list[str]:
    """The rows of the table whose families were measured."""
    known = [row for row in sorted(describe()) if row[0] in measured]
    return [f"| `{name}` | {models} | {rest} | {measured[name]:.0e} |" for name, models, rest in known]


def main() -> None:
    """Measure and write."""
    table = ["| `model_type` | models | what they have | difference |", "|---|---|---|---|", *rows(differences())]
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    PAGE.write_text(before + "\n" + "\n".join(table) + "\n\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
