"""The study that a command line of `residua compare` names: a file, a folder, results or variants."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from residua.config.settings import ConfigError, of_file, read_toml
from residua.config.variants import is_known
from residua.study.config import DEMO, StudyConfig
from residua.study.given import changed, started
from residua.study.plan import STARTED, STUDY
from residua.study.saved import SavedStudy


def named_study(
    what: list[str], demo: bool, given: dict[str, Any], start: Path | None, folder: Path | None, results: Path | None
) -> StudyConfig:
    """The study that is named, with what the command line changes in it."""
    if start is not None:
        _refuse_other_shapes(given)
    file, study = _written(what, demo, folder, results, "tasks" in given)
    if start is not None:
        study = started(_without_shapes(study) if demo else study, start)
    with nullcontext() if file is None else of_file(file):
        study = changed(study, given)
        _require_names(study.get("tasks"), given)
        return StudyConfig(**study)


def _refuse_other_shapes(given: dict[str, Any]) -> None:
    """Refuse options that give the variants of --from other shapes than the weights have."""
    if "base" in given or "scaling" in given:
        raise ConfigError("--from gives the base and its size: leave --base and --sizes out.")
    if given.get("match", {"kind": "none"}) != {"kind": "none"}:
        raise ConfigError("variants that begin with given weights have their shapes: leave --match out.")


def _without_shapes(study: dict[str, Any]) -> dict[str, Any]:
    """The demo for given weights, without its own shapes, which they do not have."""
    return {**study, "set": [change for change in study["set"] if not change.startswith("model.")]}


def _written(
    what: list[str], demo: bool, folder: Path | None, results: Path | None, asks: bool
) -> tuple[str | Path | None, dict[str, Any]]:
    """The demo, a study file, the study of a folder or of a results file, or named variants; and the file it is in.

    A results file's tasks are part of its study only if the command `asks` tasks: their files are elsewhere.
    """
    files = [name for name in what if name.endswith(".toml")]
    if demo and what:
        raise ConfigError("--demo has its own variants: give either --demo or names.")
    if demo:
        return None, read_toml(DEMO)
    if files:
        if len(what) > 1:
            raise ConfigError(f"{files[0]} is a whole study: give either one study file or names of variants.")
        study = read_toml(files[0])
        _refuse_run(files[0], study)
        return files[0], {"name": Path(files[0]).stem, **study}
    if folder is not None:
        file = folder / (STARTED if (folder / STARTED).exists() else STUDY)
        if not file.exists():
            raise ConfigError(f"{folder} holds no study (no {STUDY}): name the study file it was made from.")
        return file, read_toml(file)
    if not what and results is not None and results.exists():
        saved = SavedStudy.read(results)
        named = {} if saved.tasks is None or not asks else {"tasks": saved.tasks.model_dump(exclude_none=True)}
        return None, {**saved.study, **named}
    if not what and results is not None:
        raise ConfigError(
            f"{results} does not exist, so there is no study to continue: name its variants, or another file."
        )
    _refuse_other_words(what)
    if len(what) < 2:
        raise ConfigError("name two variants or more, a study file, or --demo; `residua compare --list` has the names.")
    return None, {"variants": what}


def _refuse_run(file: str, study: dict[str, Any]) -> None:
    """Refuse the configuration of a run, and a study that extends one."""
    if "variants" in study and "extends" in study:
        raise ConfigError(
            f"{file}: a study extends nothing: write base = {study['extends']!r}, which its variants change."
        )
    if "variants" not in study and ("extends" in study or isinstance(study.get("model"), dict)):
        raise ConfigError(
            f"{file} configures a run, not a study: compare variants of it with `residua compare prenorm mgr --base "
            f"{file}`."
        )


def _refuse_other_words(what: list[str]) -> None:
    """Say what to do with words that are no names of variants."""
    for word in what:
        if word.endswith(".json"):
            raise ConfigError(f"{word} is a file, not a variant: name a results file with --results {word}.")
        if "/" in word and len(what) == 1:
            raise ConfigError(f"{word} is no folder: name the folder of a study, a study file, or variants.")
        if "/" in word:
            raise ConfigError(f"{word} is a path, not a variant: name a study's folder alone, without variants.")
        if not is_known(word) and any((Path(word) / name).is_file() for name in (STUDY, STARTED)):
            raise ConfigError(f"{word} is the folder of a study, not a variant: name it alone, without variants.")
        if "," in word:
            names = " ".join(" ".join(what).replace(",", " ").split())
            raise ConfigError(f"{word!r} holds a comma: separate variants by spaces, as in `residua compare {names}`.")


def _require_names(tasks: Any, given: dict[str, Any]) -> None:
    """Refuse options of tasks if neither the command nor the study names any."""
    if "tasks" in given and "names" not in tasks:
        option = {"folder": "--task-dir"}.get(next(iter(tasks)), f"--{next(iter(tasks))}")
        raise ConfigError(f"{option} needs --tasks: name the tasks, or a group such as exoformer.")
