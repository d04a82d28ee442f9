"""Extend a saved study by another one: what was run already is not run again, and the two become one study.

Two runs are the same if size, variant, seed and budget have the same names, the text has the same fingerprint, and the
configurations are equal in every key but those of PLACE. The same names with anything else different are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError, Frozen
from residua.reading import counted, shown
from residua.storage.load import weights_fingerprint
from residua.study.config import StudyConfig, Tasks
from residua.study.places import found_here, name_bases, same_place
from residua.study.plan import STARTED, STUDY, PlannedRun, StudyPlan
from residua.study.runs import RunRecord, is_complete, read_environment, read_run
from residua.study.saved import SavedStudy, Timings
from residua.study.trials import PLACE
from residua.train.environment import START
from residua.version import MATHEMATICS


@dataclass(frozen=True)
class Extended:
    """A study and a saved one as one: the merged study and plan, and what is known of the saved runs.

    `asked` are the runs of the study itself.
    """

    study: StudyConfig
    plan: StudyPlan
    known: dict[PlannedRun, RunRecord]
    timings: Timings
    asked: tuple[PlannedRun, ...]
    commands: tuple[str, ...] = ()

    @property
    def new(self) -> StudyPlan:
        """The runs that are not saved."""
        return replace(self.plan, runs=tuple(run for run in self.plan.runs if run not in self.known))

    @cached_property
    def left(self) -> tuple[PlannedRun, ...]:
        """The runs, with trials of learning rates, that were left to train when this was first asked."""
        runs = (*self.new.runs, *self.plan.trials)
        return tuple(run for run in runs if not is_complete(run.folder, run.config))

    def start_of(self, run: PlannedRun) -> str | None:
        """Where this study has the weights that a run begins with.

        A saved run that this study does not ask for has a path as another study saw it. It is compared with the weights
        that the runs of this study begin with.
        """
        models = self.plan.models
        if run in self.asked or run not in self.known:
            return models[run.size, run.variant].config.train.start
        starts = {models[own.size, own.variant].config.train.start for own in self.asked}
        return starts.pop() if len(starts) == 1 else None


def alone(study: StudyConfig, plan: StudyPlan) -> Extended:
    """A study by itself."""
    return Extended(study, plan, {}, {}, plan.runs)


def extend(path: Path, study: StudyConfig, plan: StudyPlan, fingerprint: str, out: Path) -> Extended:
    """Merge a study and its plan in `out` with the saved study in `path`; ConfigError if they contradict.

    A file without runs binds nothing.
    """
    saved = SavedStudy.read(path)
    if not saved.runs:
        return alone(study, plan)
    if saved.fingerprint != fingerprint:
        raise ConfigError(
            f"{path} was trained on another text (fingerprint {saved.fingerprint}, here {fingerprint}): name the "
            "folder of the same text, prepared in the same way, with --data, or another file for --results."
        )
    merged = _merged(path, saved.config, study)
    before = saved.plan(out, next(iter(plan.models.values())).config.data.path)
    kept = saved.records(before)
    moved = _moved_starts(kept, plan)
    for key, model in before.models.items():
        if key in plan.models:
            _check_model(path, key, model.config, plan.models[key].config, key in moved)
    asked = {_place(run): run for run in plan.runs}
    # A saved run that this study asks for takes the study's own PlannedRun, and so its place in the plan.
    known = {asked.get(_place(run), run): record for run, record in kept.items()}
    _check_runs(path, known)
    others = tuple(run for run in before.runs if _place(run) not in asked)
    models = {**before.models, **plan.models}
    rates = {(rate.size, rate.variant): rate for rate in (*before.tuned, *plan.tuned)}
    whole = StudyPlan(models, (*others, *plan.runs), plan.text_tokens, tuple(rates.values()), plan.trials)
    return Extended(merged, whole, known, saved.timings, plan.runs, saved.commands)


def refuse_other_weights(whole: Extended, results: Path | None) -> None:
    """Refuse to train the rest of a study whose other runs began with weights that have changed since."""
    if not whole.left:
        return
    for run in (*whole.plan.runs, *whole.plan.trials):
        start, saved = whole.start_of(run), whole.known.get(run)
        began = (read_environment(run.folder) if saved is None else saved.environment).get(START)
        now = None if start is None or began is None else weights_fingerprint(start)
        if now is not None and now != began:
            where = f"{run.folder}" if saved is None else f"{run.title} of {results}"
            otherwise = "choose another --out" if saved is None else "name another file for --results"
            raise ConfigError(
                f"{where} began with other weights than {start} holds now (fingerprint {began}, now {now}): restore "
                f"those weights, or {otherwise}."
            )


def missing_weights(whole: Extended) -> str:
    """A sentence if runs that are left to train have no weights to begin with; else empty."""
    starts = dict.fromkeys(start for run in whole.left if (start := whole.start_of(run)) is not None)
    missing = next((start for start in starts if weights_fingerprint(start) is None), None)
    if missing is None:
        return ""
    are = "run is" if len(whole.left) == 1 else "runs are"
    return (
        f"{missing} holds no weights to begin with, and {len(whole.left)} {are} left to train: name the run that has "
        "them with --from."
    )


def extend_sentences(path: Path, extended: Extended) -> list[str]:
    """What a person should know about the saved runs."""
    known = list(extended.known.values())
    left = sum(not is_complete(run.folder, run.config) for run in extended.new.runs)
    kept = f"{counted(len(known), 'run')} of {path.name} will not be trained again"
    told = [f"{kept}; {counted(left, 'run') if left else 'none'} left to train."] if known else []
    old = sorted({run.environment.get("mathematics", MATHEMATICS) for run in known} - {MATHEMATICS})
    if old:
        told.append(
            f"{path.name} holds runs of mathematics version {', '.join(map(str, old))}, and this Residua has "
            f"{MATHEMATICS}: the same configuration may compute something else. Name another file for --results to "
            "train them again."
        )
    return told


def with_earlier(study: StudyConfig, out: Path) -> StudyConfig:
    """The study with the recipes, tasks and search of rates of an earlier one in its folder: a rerun keeps them."""
    if not (out / STUDY).exists():
        return study
    earlier = StudyConfig.from_toml(out / STUDY)
    recipes = tuple(dict.fromkeys((*earlier.quantize, *study.quantize)))
    told = "calibration" in study.model_fields_set or not earlier.quantize
    calibration = study.calibration if told else earlier.calibration
    kept = {"tasks": both_tasks(earlier.tasks, study.tasks), "tune": study.tune or earlier.tune}
    return study.model_copy(update={"quantize": recipes, "calibration": calibration, **kept})


def settled(study: StudyConfig, out: Path, results: Path | None = None) -> StudyConfig:
    """The study as it begins: with what an earlier one in its folder measured, and its files by content.

    Bases are called as the results file or the folder calls the same content.
    """
    known: dict[str, dict[str, Any]] = {}
    for file in (out / STUDY, out / STARTED):
        if file.exists():
            known |= StudyConfig.from_toml(file).bases or {}
    if results is not None and results.exists():
        known = {**(SavedStudy.read(results).config.bases or {}), **known}
    return name_bases(with_earlier(study, out), known).model_copy(update={"set": found_here(study.set)})


def both_tasks(earlier: Tasks | None, tasks: Tasks | None) -> Tasks | None:
    """The tasks of both, unless they are asked in another way now."""
    if tasks is None or earlier is None:
        return tasks or earlier
    names = tuple(dict.fromkeys((*earlier.names, *tasks.names)))
    return (
        tasks.model_copy(update={"names": names})
        if earlier == tasks.model_copy(update={"names": earlier.names})
        else tasks
    )


def _merged(path: Path, before: StudyConfig, study: StudyConfig) -> StudyConfig:
    """One study with the variants, seeds, sizes and budgets of both."""
    for key in ("baseline", "match", "confidence", "tune"):
        old, new = getattr(before, key), getattr(study, key)
        if old != new:
            name, theirs, ours = _differing(key, old, new)
            raise ConfigError(
                f"{path} has {name} = {theirs} and this study {ours}: use the same, or name another file for --results."
            )
    return StudyConfig(
        **{
            **study.model_dump(exclude_none=True),
            "name": before.name,
            "variants": {**before.variants, **study.variants},
            "seeds": tuple(sorted({*before.seeds, *study.seeds})),
            "scaling": _scaling(path, before, study),
            "ladder": tuple(sorted({*before.ladder, *study.ladder})),
            "ladder_of": "all" if "all" in (before.ladder_of, study.ladder_of) else "baseline",
            "quantize": tuple(dict.fromkeys((*before.quantize, *study.quantize))),
            "bases": {**(before.bases or {}), **(study.bases or {})} or None,
            "tasks": both_tasks(before.tasks, None if study.tasks is None else study.tasks.anywhere),
            "workers": max(before.workers, study.workers),
            "time_alone": before.time_alone or study.time_alone,
        }
    )


def _differing(key: str, old: object, new: object) -> tuple[str, str, str]:
    """The name of the first setting that differs, of tables such as `match` that in the table, and both values."""
    if isinstance(old, Frozen) or isinstance(new, Frozen):
        tables = [value.model_dump() if isinstance(value, Frozen) else {} for value in (old, new)]
        name = next(name for name in {**tables[0], **tables[1]} if tables[0].get(name) != tables[1].get(name))
        key, old, new = f"{key}.{name}", tables[0].get(name), tables[1].get(name)
    theirs, ours = ("none" if value is None else shown(value) for value in (old, new))
    return key, theirs, ours


def _scaling(path: Path, before: StudyConfig, study: StudyConfig) -> dict[str, object] | None:
    if before.scaling is None and study.scaling is None and before.base == study.base:
        return None
    if before.scaling is None and study.scaling is None:
        raise ConfigError(
            f"{path} compares variants of {before.base} and this study those of {study.base}, which is another run: "
            "begin with the same one, or name another file for --results."
        )
    rules = [s.scaling.tokens_per_parameter if s.scaling else None for s in (before, study)]
    if before.scaling is None or study.scaling is None or rules[0] != rules[1]:
        raise ConfigError(
            f"{path} has the sizes {', '.join(before.sizes)} and this study {', '.join(study.sizes)}, not scaled in "
            "the same way: use the same --base, --sizes and --tokens-per-parameter, or name another file for --results."
        )
    return {**study.scaling.model_dump(), "sizes": tuple(dict.fromkeys((*before.sizes, *study.sizes)))}


_OF_A_RUN = ("data.seed", "train.seed")
_START = ("train.start",)


def _moved_starts(kept: dict[PlannedRun, RunRecord], plan: StudyPlan) -> set[tuple[str, str]]:
    """The models whose saved runs began with the weights that the study names, wherever they are now.

    Weights that are not there contradict nothing: no run can begin with them.
    """
    found = set()
    for run, record in kept.items():
        key, began = (run.size, run.variant), record.environment.get(START)
        start = plan.models[key].config.train.start if key in plan.models else None
        if began is not None and start is not None and weights_fingerprint(start) in (None, began):
            found.add(key)
    return found


def _check_model(path: Path, key: tuple[str, str], saved: RunConfig, planned: RunConfig, moved: bool) -> None:
    """Refuse a model whose settings differ; `moved`: it begins with the same weights, wherever they are."""
    moved = moved or same_place(saved.train.start, planned.train.start)
    old, new = (settings(config, without=PLACE + _OF_A_RUN + _START * moved) for config in (saved, planned))
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"{path} has {key[1]} with {name} = {old.get(name)!r}, and this study needs {new.get(name)!r}: give "
                "the variant another name, or name another file for --results."
            )


def _check_runs(path: Path, known: dict[PlannedRun, RunRecord]) -> None:
    """Refuse a run that the study's folder and the saved study both have, with different results."""
    for run, saved in known.items():
        if not is_complete(run.folder, run.config):
            continue
        own = read_run(run.folder, run.config)
        if own.loss_curve != saved.loss_curve:
            raise ConfigError(
                f"{run.folder} ends with a loss of {own.final_loss:.6f} and the same run in {path} with "
                f"{saved.final_loss:.6f}: remove that folder, or name another file for --results."
            )


def _place(run: PlannedRun) -> tuple[object, ...]:
    return run.size, run.variant, run.seed, run.budget
