"""The models that come with Residua: TOML files with `summary`, optional `extends`, `[model]` and `[train]`."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from residua.config.settings import ConfigError, merge, read_toml
from residua.reading import shown

_FOLDER = files("residua") / "config" / "presets"


@cache
def names() -> tuple[str, ...]:
    """Every preset, sorted."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml")))


def load(name: Any) -> dict[str, Any]:
    """The tables of a preset, merged over those of the preset it extends. `name` may come from a file, as `extends`."""
    if not isinstance(name, str):
        raise ConfigError(f"extends = {shown(name)} should be the name of a preset: `residua presets` lists them.")
    if name not in names():
        near = get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "`residua presets` lists them."
        raise ConfigError(f"preset {name!r} does not exist: {hint}")
    data = read_toml(str(_FOLDER / f"{name}.toml"))
    parent = data.pop("extends", None)
    return merge(load(parent), data) if parent else data
