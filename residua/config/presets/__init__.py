"""The models that come with Residua: TOML files with `summary`, optional `extends`, `[model]` and `[train]`.

sizes.json holds what counting their parameters gives, so that listing them needs no torch; `make sizes` writes it.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from residua.config.settings import ConfigError, merge, read_toml
from residua.reading import Count, Shape, read_json, shown

_FOLDER = Path(__file__).parent
SIZES = _FOLDER / "sizes.json"


class Size(Shape):
    """Parameters of a preset's model, those in experts that a token does not visit, and training FLOPs per token."""

    parameters: Count
    idle: Count
    flops_per_token: Count


@cache
def names() -> tuple[str, ...]:
    """Every preset, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml")))


def load(name: Any) -> dict[str, Any]:
    """The tables of a preset, merged over those of the preset it extends. `name` may come from a file, as `extends`."""
    if not isinstance(name, str):
        raise ConfigError(f"extends = {shown(name)} should be the name of a preset: `residua presets` lists them.")
    if name.endswith(".toml") and name not in names():
        raise ConfigError(f"{name!r} is a file, where only a preset can stand: `residua presets` lists them.")
    if name not in names():
        near = get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`residua presets` lists them."
        raise ConfigError(f"preset {name!r} does not exist: {hint}")
    data = read_toml(str(_FOLDER / f"{name}.toml"))
    parent = data.pop("extends", None)
    return merge(load(parent), data) if parent else data


@cache
def sizes() -> dict[str, Size]:
    """The size of every preset, as `residua.model.size.measure` counts it."""
    return read_json(SIZES, dict[str, Size], "install Residua again, or run `make sizes` in a checkout")
