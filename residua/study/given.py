"""A study that was written down, changed by what a command line says: only what is named there changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig
from residua.model.size import shapes
from residua.storage.load import start_changes

_OF_A_START = ("train.start", "model.vocab_size", "data.tokenizer")
"""What the weights to begin with decide: a study that begins with others takes theirs."""


def changed(study: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A study with options of the command line; bases named there replace those that it keeps.

    Changes of `set` are added to the study's own, and a table such as `tune` keeps the keys that are not named.
    """
    kept = {key: value for key, value in study.items() if key != "bases" or not {"base", "scaling"} & given.keys()}
    joined = {key: join(kept[key], given[key]) for key, join in _JOINED.items() if key in kept and key in given}
    return {**kept, **given, **joined}


def started(study: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """A study whose variants begin with the weights of a run, and so must have their shapes."""
    base, changes = start_changes(run)
    own = study.get("set", [])
    if _is_list(own):
        topology = shapes(RunConfig.from_toml(base).model).topology
        if topology.initialization().is_additive:  # others cannot be given another topology
            changes.append("model.reader_eps=sum")
        own = [*changes, *(change for change in own if _key(change) not in _OF_A_START)]
    kept = {key: value for key, value in study.items() if key != "bases"}
    return {**kept, "base": base, "match": {"kind": "none"}, "set": own}


def _both_sets(own: Any, given: list[str]) -> Any:
    """The study's own changes, then those given, without own ones of the same key."""
    if not _is_list(own):
        return own  # refused when the study is read
    named = {_key(change) for change in given}
    return [*(change for change in own if _key(change) not in named), *given]


def _other_rule(own: Any, given: dict[str, Any]) -> Any:
    """Another rule of matching with the study's tolerance, if the rule has one."""
    return {**own, **given} if isinstance(own, dict) and given["kind"] != "none" else given


def _both_tables(own: Any, given: dict[str, Any]) -> Any:
    return {**own, **given} if isinstance(own, dict) else given


def _same_tasks(own: Any, given: dict[str, Any]) -> Any:
    """The study's tasks asked in another way, unless tasks are named."""
    return given if "names" in given else _both_tables({"names": own} if isinstance(own, list) else own, given)


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "set": _both_sets, "match": _other_rule, "tune": _both_tables, "tasks": _same_tasks,
}  # fmt: skip
"""How an option joins what the study has under the same key; others replace it."""


def _key(change: str) -> str:
    return change.partition("=")[0].replace(" ", "")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
