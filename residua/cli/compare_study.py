"""Find the study that a command line of `residua compare` names, and apply the options to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig
from residua.config.settings import ConfigError, of_file, override_key, read_toml
from residua.config.variants import is_known
from residua.model.size import shapes
from residua.storage.load import start_changes
from residua.study.config import DEMO, StudyConfig
from residua.study.plan import STARTED, STUDY
from residua.study.results_file import SavedStudy

_OF_A_START = ("train.start", "model.vocab_size", "data.tokenizer")
"""Settings that follow from the initial weights; a study that starts from other weights takes theirs."""


def resolve_study(
    what: list[str], demo: bool, options: dict[str, Any], start: Path | None, folder: Path | None, results: Path | None
) -> StudyConfig:
    """The named study, with the changes of the command line."""
    if start is not None:
        _refuse_other_shapes(options)
    file, study = _written(what, demo, folder, results, "tasks" in options)
    if start is not None:
        study = start_study(_without_shapes(study) if demo else study, start)
    with nullcontext() if file is None else of_file(file):
        study = change_study(study, options)
        _require_names(study.get("tasks"), options)
        return StudyConfig(**study)


def _refuse_other_shapes(options: dict[str, Any]) -> None:
    """Refuse options that would change the shapes given by the weights of --from."""
    if "base" in options or "scaling" in options:
        raise ConfigError("--from sets the base and its size: leave --base and --sizes out.")
    if options.get("match", {"kind": "none"}) != {"kind": "none"}:
        raise ConfigError("--match cannot be used with --from, whose weights fix the shapes: leave --match out.")


def _without_shapes(study: dict[str, Any]) -> dict[str, Any]:
    """The demo without its shapes, which those of given weights replace."""
    return {**study, "set": [change for change in study["set"] if not change.startswith("model.")]}


def _written(
    what: list[str], demo: bool, folder: Path | None, results: Path | None, asks: bool
) -> tuple[str | Path | None, dict[str, Any]]:
    """The study of the demo, a file, a folder, a results file or named variants; and the file that holds it.

    The tasks of a results file belong to the study only if the command `asks` for tasks: their files may be missing.
    """
    files = [name for name in what if name.endswith(".toml")]
    if demo and (files or folder is not None):
        raise ConfigError(f"--demo is a complete study: give either --demo or {what[0]}.")
    if demo:
        return None, read_toml(DEMO) | (_named_variants(what) | {"baseline": what[0]} if what else {})
    if files:
        if len(what) > 1:
            raise ConfigError(f"{files[0]} is a complete study: give either one study file or names of variants.")
        study = read_toml(files[0])
        _refuse_run(files[0], study)
        return files[0], {"name": Path(files[0]).stem, **study}
    if folder is not None:
        file = folder / (STARTED if (folder / STARTED).exists() else STUDY)
        if not file.exists():
            raise ConfigError(f"{folder} holds no study (no {STUDY}): name the study file that it was made from.")
        return file, read_toml(file)
    if not what and results is not None and results.exists():
        saved = SavedStudy.read(results)
        named = {} if saved.tasks is None or not asks else {"tasks": saved.tasks.model_dump(exclude_none=True)}
        return None, {**saved.study, **named}
    if not what and results is not None:
        raise ConfigError(
            f"{results} does not exist, so there is no study to continue: name the variants to compare, or "
            "another file."
        )
    return None, _named_variants(what)


def _named_variants(what: list[str]) -> dict[str, Any]:
    _refuse_other_words(what)
    if len(what) < 2:
        raise ConfigError(
            "name at least two variants, a study file, or --demo; `residua compare --list` shows the names."
        )
    return {"variants": what}


def _refuse_run(file: str, study: dict[str, Any]) -> None:
    """Refuse the configuration of a run, and a study with the key `extends`."""
    if "variants" in study and "extends" in study:
        raise ConfigError(
            f"{file}: a study has no key 'extends': write base = {study['extends']!r}, the run that its variants "
            "change."
        )
    if "variants" not in study and ("extends" in study or isinstance(study.get("model"), dict)):
        raise ConfigError(
            f"{file} configures a run, not a study: to compare variants of that run, use `residua compare prenorm mgr "
            f"--base {file}`."
        )


def _refuse_other_words(what: list[str]) -> None:
    """Explain what to do with words that are not variants."""
    for word in what:
        if word.endswith(".json"):
            raise ConfigError(f"{word} is a file, not a variant: name a results file with --results {word}.")
        if "/" in word and len(what) == 1:
            raise ConfigError(f"{word} is not a folder: name a study folder, a study file, or variants.")
        if "/" in word:
            raise ConfigError(f"{word} is a path, not a variant: give either a study folder or variants.")
        if not is_known(word) and any((Path(word) / name).is_file() for name in (STUDY, STARTED)):
            raise ConfigError(f"{word} is a study folder, not a variant: give either the folder or variants.")
        if "," in word:
            names = " ".join(" ".join(what).replace(",", " ").split())
            raise ConfigError(
                f"{word!r} contains a comma: separate variants by spaces, as in `residua compare {names}`."
            )


def _require_names(tasks: Any, options: dict[str, Any]) -> None:
    """Refuse options of tasks if neither the command nor the study names any."""
    if "tasks" in options and "names" not in tasks:
        option = {"folder": "--task-dir"}.get(next(iter(tasks)), f"--{next(iter(tasks))}")
        raise ConfigError(f"{option} needs --tasks: name the tasks, or a group such as exoformer.")


def change_study(study: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """A study with the options of the command line, whose bases replace its own.

    Changes in `set` are added to the study's own, and a table such as `tune` keeps the keys that no option names.
    """
    rest = {key: value for key, value in study.items() if key != "bases" or not {"base", "scaling"} & options.keys()}
    joined = {key: join(rest[key], options[key]) for key, join in _JOINED.items() if key in rest and key in options}
    return {**rest, **options, **joined}


def start_study(study: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """A study whose variants start from the weights of a run, and so have their shapes."""
    base, changes = start_changes(run)
    study_changes = study.get("set", [])
    if _is_list(study_changes):
        topology = shapes(RunConfig.from_toml(base).model).topology
        if topology.initialization().is_additive:  # others cannot be given another topology
            changes.append("model.reader_eps=sum")
        study_changes = [*changes, *(change for change in study_changes if override_key(change) not in _OF_A_START)]
    rest = {key: value for key, value in study.items() if key != "bases"}
    return {**rest, "base": base, "match": {"kind": "none"}, "set": study_changes}


def _both_sets(setting: Any, option: list[str]) -> Any:
    """The study's changes, then those of the command line, which win where the key is the same."""
    if not _is_list(setting):
        return setting  # refused when the study is read
    named = {override_key(change) for change in option}
    return [*(change for change in setting if override_key(change) not in named), *option]


def _other_rule(setting: Any, option: dict[str, Any]) -> Any:
    """The matching rule of the command line; it keeps the study's tolerance, and for the same rule all keys."""
    if not isinstance(setting, dict) or option["kind"] == "none":
        return option
    same = option["kind"] == setting.get("kind", "ffn")
    return {key: value for key, value in setting.items() if same or key == "tolerance"} | option


def _both_tables(setting: Any, option: dict[str, Any]) -> Any:
    return {**setting, **option} if isinstance(setting, dict) else option


def _same_tasks(setting: Any, option: dict[str, Any]) -> Any:
    """The study's tasks with changed settings, unless the command names tasks."""
    tasks = {"names": setting} if isinstance(setting, list) else setting
    return option if "names" in option else _both_tables(tasks, option)


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "set": _both_sets, "match": _other_rule, "tune": _both_tables, "tasks": _same_tasks,
}  # fmt: skip
"""How an option combines with the study's value of the same key; other options replace it."""


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
