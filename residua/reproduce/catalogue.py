"""The entries that come with Residua: `entries/004/table1.toml` is `004:table1`."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel, ValidationError

from residua.config.settings import ConfigError, explain, of_file, read_toml, suggest
from residua.reproduce.entry import Entry, Inside, Nothing, Study

FOLDER = Path(str(files("residua") / "reproduce" / "entries"))
DOCUMENTS = {
    "000": "Attention Projection Mixing and Exogenous Anchors (ExoFormer)",
    "001": "Attention Residuals: Teaching transformers to choose which layers matter (article)",
    "002": "Attention Residuals (the authors' summary)",
    "003": "A Unified View of Attention and Residual Sinks (outlier-driven rescaling)",
    "004": "Multi-Gate Residuals",
}
"""The documents. 002 numbers neither its pictures nor its table: they are counted in order of appearance."""

KINDS: dict[str, type[BaseModel]] = {"study": Study, "inside": Inside, "none": Nothing}


class _File(RootModel[Entry]):
    """The content of one file."""


@cache
def names() -> tuple[str, ...]:
    """Every entry, by document, figures first, in the order of their numbers."""
    return tuple(sorted((f"{path.parent.name}:{path.stem}" for path in FOLDER.glob("*/*.toml")), key=_place))


def load(name: str) -> Study | Inside | Nothing:
    """An entry by name, such as `004:table1`."""
    if name not in names():
        raise ConfigError(f"there is no entry {name!r}: {suggest(name, names(), 'residua reproduce')}")
    document, _, place = name.partition(":")
    return read_entry(FOLDER / document / f"{place}.toml")


def read_entry(path: Path) -> Study | Inside | Nothing:
    """An entry's file, checked."""
    with of_file(path):
        tables: dict[str, Any] = read_toml(path)
        try:
            return _File.model_validate(tables).root
        except ValidationError as error:
            raise ConfigError(explain(error, KINDS.get(str(tables.get("kind")), Study))) from None


def printed_place(name: str) -> str:
    """`004:table1` as the paper writes it: Table 1."""
    found = re.fullmatch(r"(table|fig)(\d+)", name.partition(":")[2])
    assert found is not None
    return f"{'Table' if found[1] == 'table' else 'Figure'} {found[2]}"


def _place(name: str) -> tuple[str, str, int]:
    document, _, place = name.partition(":")
    letters = place.rstrip("0123456789")
    return document, letters, int(place[len(letters) :] or 0)
