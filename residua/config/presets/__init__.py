"""The models that come with Residua, in one TOML file per family.

A table is a preset: `summary`, optional `extends`, `model`, `data` and `train`. `[grid.G]` makes one preset of every
size and variant: its name and summary are patterns, which sizes and variants fill in with their key and their `label`.
A variant's tables are laid over the size's, and those of its `at.SIZE` over both.

sizes.json holds what counting their parameters gives, so that listing them needs no torch; `make sizes` writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from residua.config.settings import ConfigError, merge, read_toml
from residua.reading import Count, Shape, read_json, shown

_FOLDER = Path(__file__).parent
SIZES = _FOLDER / "sizes.json"


class Size(Shape):
    """Parameters of a preset's model, those in experts that a token does not use, and training FLOPs per token."""

    parameters: Count
    idle: Count
    flops_per_token: Count


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """The tables of every preset by name, without those of the preset that it extends."""
    presets: dict[str, dict[str, Any]] = {}
    for path in sorted(_FOLDER.glob("*.toml")):
        family = read_toml(path)
        grids = family.pop("grid", {})
        presets |= family
        for grid in grids.values():
            presets.update(_expanded(grid))
    return presets


def _expanded(grid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The presets of a grid with their names."""
    for (size, of_size), (variant, of_variant) in product(grid["size"].items(), grid["variant"].items()):
        tables = merge(merge(of_size, of_variant), of_variant.get("at", {}).get(size, {}))
        tables.pop("at", None)
        label = grid["summary"].format(size=of_size["label"], variant=tables.pop("label"))
        if "extends" in tables:
            tables["extends"] = tables["extends"].format(size=size)
        yield grid["name"].format(size=size, variant=variant), {**tables, "summary": label}


@cache
def names() -> tuple[str, ...]:
    """Every preset, sorted."""
    return tuple(sorted(_tables()))


def load(name: Any) -> dict[str, Any]:
    """The tables of a preset, merged over those of the preset it extends. `name` may come from a file, as `extends`."""
    if not isinstance(name, str):
        raise ConfigError(f"extends = {shown(name)} should be the name of a preset: `residua presets` lists them.")
    if name.endswith(".toml") and name not in names():
        raise ConfigError(f"{name!r} is a file, but only a preset can be extended: `residua presets` lists them.")
    if name not in names():
        near = get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`residua presets` lists them."
        raise ConfigError(f"preset {name!r} does not exist: {hint}")
    data = deepcopy(_tables()[name])
    parent = data.pop("extends", None)
    return merge(load(parent), data) if parent else data


@cache
def sizes() -> dict[str, Size]:
    """The size of every preset, as `residua.model.size.measure` counts it."""
    return read_json(SIZES, dict[str, Size], "install Residua again, or run `make sizes` in a checkout")
