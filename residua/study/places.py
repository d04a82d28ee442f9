"""Places of files that a study depends on: what to call them, and how to write them where others can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError
from residua.files import is_plain_name
from residua.reading import parse_toml_value, toml_string
from residua.study.config import StudyConfig

_PLACES = ("train.start", "data.tokenizer")
"""Settings whose value may be a path."""


def portable(path: str) -> str:
    """A path for another machine: seen from the working folder, or only its last part if it is not in there."""
    place = Path(path)
    if not place.is_absolute():
        return path
    here = Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else place.name


def portable_changes(changes: Iterable[str]) -> tuple[str, ...]:
    """The changes of a study, with portable paths."""
    return tuple(_with_path(change, portable) for change in changes)


def portable_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a run, without the place of its text, and with portable paths."""
    data = {key: value for key, value in run["data"].items() if key != "path"}
    tables = {**run, "data": data, "train": dict(run.get("train", {}))}
    for setting in _PLACES:
        section, key = setting.split(".")
        if tables[section].get(key) is not None:
            tables[section][key] = portable(tables[section][key])
    return tables


def found_here(changes: Iterable[str]) -> tuple[str, ...]:
    """The changes of a study, with the whole paths of files that are there."""
    return tuple(_with_path(change, _whole) for change in changes)


def _whole(path: str) -> str:
    return str(Path(path).resolve()) if Path(path).exists() else path


def same_place(saved: str | None, planned: str | None) -> bool:
    """Whether a path as it was saved, whole or portable, can be the planned one."""
    if saved is None or planned is None or Path(saved).is_absolute():
        return saved == planned
    return portable(planned) == saved


def _with_path(change: str, write: Callable[[str], str]) -> str:
    """A change with its path written in another way, if it has one."""
    key, _, text = change.partition("=")
    value = parse_toml_value(text.strip())
    if key.strip() not in _PLACES or not isinstance(value, str) or value == write(value):
        return change
    return f"{key.strip()}={toml_string(write(value))}"


def name_bases(study: StudyConfig, known: Mapping[str, dict[str, Any]]) -> StudyConfig:
    """The study with the content of the files that `base` or `sizes` name: it can be continued without them.

    A file has the name that `known` has for the same content, or else a short one.
    """
    kept, names, bases = study.bases or {}, {}, dict(study.bases or {})
    for size in study.sizes:
        if size not in kept and not size.endswith(".toml"):
            continue
        base = bases.pop(size, None) or RunConfig.find(size).model_dump(mode="json", exclude_none=True)
        same = [name for name, other in known.items() if _content(other) == _content(base)]
        short = size if size in kept else _short(size, several=study.scaling is not None)
        chosen = next((name for name in (*same, short) if name not in bases), size)
        names[size], bases[chosen] = chosen, base
    return _renamed(study, names).model_copy(update={"bases": bases or None})


def _short(file: str, several: bool) -> str:
    """The name of a base's file; of a run's config.toml that of its folder, unless sizes name the study's folders."""
    path = Path(file)
    folder = path.resolve().parent.name
    return f"{folder}.toml" if path.name == "config.toml" and not several and is_plain_name(folder) else path.name


def _content(base: Mapping[str, Any]) -> object:
    """What a base says, but for places; None if it cannot be built here."""
    with suppress(ConfigError):
        return settings(RunConfig(**base), without=("data.path", *_PLACES))
    return None


def _renamed(study: StudyConfig, names: Mapping[str, str]) -> StudyConfig:
    """The study with other names of its bases."""
    changes: dict[str, Any] = {"base": names.get(study.base, study.base)}
    if study.scaling is not None:
        sizes = tuple(names.get(size, size) for size in study.scaling.sizes)
        changes = {"scaling": study.scaling.model_copy(update={"sizes": sizes})}
    return study.model_copy(update=changes)
