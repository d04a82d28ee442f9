"""Resume a study: join the records of its folder with those of its results file, keyed by run.

No run is repeated. Two runs are the same if they agree in size, variant, seed, budget, the text's fingerprint, and all
configuration keys except those of PLACE. Runs that share these names but differ in anything else are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from residua.config.run import RunConfig, settings
from residua.config.settings import ConfigError, Frozen
from residua.data import Dataset, unigram_entropy
from residua.files import is_plain_name, write_atomically
from residua.reading import ReadError, Shape, counted, inside, read_json, shown
from residua.storage.load import weights_fingerprint
from residua.study.config import StudyConfig, Tasks
from residua.study.plan import EXTENDED, PLACE, STARTED, STUDY, PlannedRun, StudyPlan, make_plan, read_rates
from residua.study.records import RunRecord, both, is_complete, read_environment, read_run
from residua.study.results import DatasetFacts
from residua.study.results_file import (
    OF_THE_MODEL,
    PATHS,
    SavedStudy,
    Timings,
    local_changes,
    same_place,
    save_study,
)
from residua.study.timing import StepTiming, comparable_timings, read_timings
from residua.study.train_runs import lock_results
from residua.train.environment import START
from residua.train.result import final_tokens
from residua.version import MATHEMATICS


@dataclass(frozen=True)
class StudyRecords:
    """The study in `out` joined with the one saved in its `results` file: their configuration and plan.

    `asked` are the study's own runs, `known` the records saved in the file, `commands` the commands that produced them.
    """

    study: StudyConfig
    plan: StudyPlan
    out: Path
    dataset: Dataset
    results: Path | None
    asked: tuple[PlannedRun, ...]
    known: dict[PlannedRun, RunRecord] = field(default_factory=dict)
    timings: Timings = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    @property
    def new(self) -> StudyPlan:
        """The plan of the runs that are not saved."""
        return replace(self.plan, runs=tuple(run for run in self.plan.runs if run not in self.known))

    @cached_property
    def left(self) -> tuple[PlannedRun, ...]:
        """The runs, including learning-rate trials, that were still to be trained when this was first called."""
        runs = (*self.new.runs, *self.plan.trials)
        return tuple(run for run in runs if not is_complete(run.folder, run.config))

    @cached_property
    def facts(self) -> DatasetFacts:
        tokens = self.dataset.split("validation").tokens
        return describe(self.dataset, final_tokens(self.plan.runs[0].config, tokens))

    def write(self) -> None:
        """Write the results of the complete runs into the results file, if there is one."""
        if self.results is None:
            return
        records, timed = complete_records(self.plan, self.known), read_timings(self.study, self.plan, self.out)
        timings = _united_timings(timed, self.timings, self.study.baseline)
        fingerprint = self.dataset.fingerprint
        saved = save_study(self.study, self.plan, records, fingerprint, self.facts, timings, self.commands)
        saved.write(self.results)

    def start_of(self, run: PlannedRun) -> str | None:
        """The path, in this study, of the weights that a run starts from.

        The path of a saved run that this study does not request was written by another study. Such a run is compared
        with the weights that this study's runs start from.
        """
        models = self.plan.models
        if run in self.asked or run not in self.known:
            return models[run.size, run.variant].config.train.start
        starts = {models[planned.size, planned.variant].config.train.start for planned in self.asked}
        return starts.pop() if len(starts) == 1 else None

    def refuse_other_weights(self) -> None:
        """Refuse to train the rest of a study if the initial weights of its other runs have changed since."""
        for run in (*self.plan.runs, *self.plan.trials) if self.left else ():
            start, saved = self.start_of(run), self.known.get(run)
            began = (read_environment(run.folder) if saved is None else saved.environment).get(START)
            now = None if start is None or began is None else weights_fingerprint(start)
            if now is not None and now != began:
                where = f"{run.folder}" if saved is None else f"{run.title} of {self.results}"
                otherwise = "choose another --out" if saved is None else "name another file for --results"
                raise ConfigError(
                    f"{where} started from weights that {start} no longer has (fingerprint {began}, now "
                    f"{now}): restore those weights, or {otherwise}."
                )

    def missing_weights(self) -> str:
        """A sentence if the initial weights of runs still to be trained are missing; else empty."""
        starts = dict.fromkeys(start for run in self.left if (start := self.start_of(run)) is not None)
        missing = next((start for start in starts if weights_fingerprint(start) is None), None)
        if missing is None:
            return ""
        are = "run is" if len(self.left) == 1 else "runs are"
        return (
            f"{missing} has no initial weights, but {len(self.left)} {are} left to train: name the run that "
            "has them with --from."
        )

    def require_weights(self) -> None:
        if missing := self.missing_weights():
            raise ConfigError(missing)

    def progress_sentence(self) -> str:
        """How many runs of the study are complete, and how many are left to train."""
        local = self.complete()
        done = sum(run in self.known or run in local for run in self.asked)
        trials = sum(not is_complete(run.folder, run.config) for run in self.plan.trials)
        tuning = f", after {counted(trials, 'trial')} of learning rates" if trials else ""
        left = f"{len(self.asked) - done or 'none'} left to train"
        return f"{done} of {counted(len(self.asked), 'run')} {'is' if done == 1 else 'are'} complete; {left}{tuning}."

    def sentences(self) -> list[str]:
        if not self.known or self.results is None:
            return []
        name, left = self.results.name, sum(not is_complete(run.folder, run.config) for run in self.new.runs)
        saved = f"{counted(len(self.known), 'run')} of {name} will not be trained again"
        sentences = [f"{saved}; {counted(left, 'run') if left else 'none'} left to train."]
        old = sorted({run.environment.get("mathematics", MATHEMATICS) for run in self.known.values()} - {MATHEMATICS})
        if old:
            sentences.append(
                f"{name} has runs of mathematics version {', '.join(map(str, old))}, but this Residua has "
                f"version {MATHEMATICS}: the same configuration may compute something else. Name another file "
                "for --results to train them again."
            )
        return sentences

    def complete(self) -> list[PlannedRun]:
        """Complete runs with a known learning rate that are only in the study's folder."""
        return [run for run in self.new.settled if is_complete(run.folder, run.config)]

    def add_complete(self, study: StudyConfig) -> str:
        """Add the complete runs in this study's folder to the results file, and no variants or seeds without runs.

        Returns a sentence saying how many runs the file then holds.
        """
        runs = self.complete()
        if runs:
            names, seeds, budgets = ({getattr(run, key) for run in runs} for key in ("variant", "seed", "budget"))
            ladder = tuple(budget for budget in study.ladder if budget in budgets)
            part = study.model_copy(
                update={
                    "variants": {name: v for name, v in study.variants.items() if name in {study.baseline, *names}},
                    "seeds": tuple(seed for seed in study.seeds if seed in seeds),
                    "ladder": () if ladder == (1.0,) else ladder,
                }
            )
            models = {key: model for key, model in self.plan.models.items() if key[1] in part.variants}
            tuned = tuple(rate for rate in self.plan.tuned if rate.variant in part.variants)
            plan = replace(self.plan, models=models, runs=tuple(runs), tuned=tuned, trials=())
            with lock_results(self.results):
                join(part, plan, self.out, self.dataset, self.results).write()
        if not self.known and not runs:
            return f"No run is complete yet, so nothing was added to {self.results}."
        return f"{self.results} has the numbers of {counted(len(self.known) + len(runs), 'complete run')}"


def describe(dataset: Dataset, limit_tokens: int) -> DatasetFacts:
    """Facts about a text; the entropy is that of the part used to measure losses."""
    return DatasetFacts(
        path=str(dataset.path),
        vocab_size=dataset.vocab_size,
        train_tokens=dataset.split("train").tokens,
        validation_tokens=dataset.split("validation").tokens,
        bytes_per_token=dataset.bytes_per_token("validation"),
        unigram_entropy=unigram_entropy(dataset, limit_tokens=limit_tokens),
    )


def plan_study(study: StudyConfig, out: Path, dataset: Dataset, results: Path | None) -> StudyPlan:
    """The plan, with learning rates from an earlier search in the results file or the study's folder."""
    saved = SavedStudy.read(results).rates() if results is not None and results.exists() else []
    return make_plan(study, out, dataset, [*read_rates(out), *saved])


def join(
    study: StudyConfig, plan: StudyPlan, out: Path, dataset: Dataset, results: Path | None, command: str = ""
) -> StudyRecords:
    """Join a study with the one in its results file; ConfigError if they contradict each other.

    A file without runs never causes a conflict.
    """
    saved = SavedStudy.read(results) if results is not None and results.exists() else None
    commands = tuple(dict.fromkeys([*(saved.commands if saved else ()), *([command] if command else [])]))
    if results is None or saved is None or not saved.runs:
        return StudyRecords(study, plan, out, dataset, results, plan.runs, commands=(command,) if command else ())
    if saved.fingerprint != dataset.fingerprint:
        raise ConfigError(
            f"{results} was trained on different text (fingerprint {saved.fingerprint}, here {dataset.fingerprint}): "
            "name the same text, prepared in the same way, with --data, or name another file for --results."
        )
    joined = _joined_config(results, saved.config, study)
    before = saved.plan(out, next(iter(plan.models.values())).config.data.path)
    records = saved.records(before)
    _check_models(results, before, plan, records)
    planned = {run.key: run for run in plan.runs}
    # A saved run that this study requests uses the study's own PlannedRun, and so keeps its place in the plan.
    known = {planned.get(run.key, run): record for run, record in records.items()}
    _check_records(results, known)
    runs = (*(run for run in before.runs if run.key not in planned), *plan.runs)
    rates = {(rate.size, rate.variant): rate for rate in (*before.tuned, *plan.tuned)}
    models = {**before.models, **plan.models}
    whole = StudyPlan(models, runs, plan.text_tokens, tuple(rates.values()), plan.trials)
    return StudyRecords(joined, whole, out, dataset, results, plan.runs, known, saved.timings, commands)


def unite(files: Sequence[Path]) -> SavedStudy:
    """Merge results files into one study of all their sizes, variants, seeds and budgets; ConfigError on a conflict."""
    whole = SavedStudy.read(files[0])
    for path in files[1:]:
        whole = _united(whole, files[0], SavedStudy.read(path), path)
    distinct: list[dict[str, Any]] = []
    runs = []
    for run in whole.runs:
        environment = whole.environments[run.environment]
        if environment not in distinct:
            distinct.append(environment)
        runs.append(run.model_copy(update={"environment": distinct.index(environment)}))
    commands = tuple(dict.fromkeys(whole.commands))
    return whole.model_copy(update={"commands": commands, "environments": tuple(distinct), "runs": tuple(runs)})


def _united(whole: SavedStudy, first: Path, other: SavedStudy, path: Path) -> SavedStudy:
    before, study = whole.config, other.config
    plans, there = (whole.plan(Path()), other.plan(Path())), whole.records(whole.plan(Path()))
    for key, values in {
        "fingerprint": (whole.fingerprint, other.fingerprint),
        "baseline": (before.baseline, study.baseline),
        "confidence": (before.confidence, study.confidence),
    }.items():
        if values[0] != values[1]:
            raise ConfigError(
                f"{first} has {key} = {values[0]} and {path} {values[1]}: only studies with the same settings can "
                "be merged."
            )
    _check_models(first, *plans, there)
    known = {run.key: record for run, record in there.items()}
    runs = dict(zip(known, whole.runs, strict=True))
    for (run, record), saved in zip(other.records(plans[1]).items(), other.runs, strict=True):
        if run.key not in known:
            runs[run.key] = saved.model_copy(update={"environment": saved.environment + len(whole.environments)})
            continue
        if known[run.key].loss_curve != record.loss_curve:
            raise ConfigError(f"{first} and {path} have {run.title} with different losses: leave one of them out.")
        mine = runs[run.key]
        measured = {key: both(getattr(mine, key), getattr(saved, key)) for key in ("peaks", *OF_THE_MODEL)}
        runs[run.key] = mine.model_copy(update=measured)
    models = {(model.size, model.variant): model for model in (*other.models, *whole.models)}
    timings = _united_timings(whole.timings, other.timings, study.baseline)
    rates = {(rate.size, rate.variant): rate for rate in (*(other.tuning or ()), *(whole.tuning or ()))}
    scalings = [
        {**(s.scaling.model_dump(exclude_none=True) if s.scaling else {}), "sizes": ()} for s in (before, study)
    ]
    rule = scalings[0] if scalings[0] == scalings[1] else {}
    size_of = {model.size: model.parameters for model in models.values() if model.variant == study.baseline}
    sizes = sorted({*before.sizes, *study.sizes}, key=lambda size: size_of.get(size, 0))
    config = _union_of(before, study) | {
        "name": before.name if before.name == study.name else f"{before.name}+{study.name}",
        "scaling": {**rule, "sizes": sizes} if len(sizes) > 1 else None,
        "tune": before.tune if before.tune == study.tune else None,
    }
    return whole.model_copy(
        update={
            "study": {key: value for key, value in {**whole.study, **config}.items() if value is not None},
            "commands": (*whole.commands, *other.commands),
            "environments": (*whole.environments, *other.environments),
            "models": tuple(model.model_copy(update={"timings": timings[key]}) for key, model in models.items()),
            "tuning": tuple(rates.values()) or None,
            "tasks": both_tasks(whole.tasks, other.tasks),
            "runs": tuple(runs.values()),
        }
    )


def _united_timings(ours: Timings, others: Timings, baseline: str) -> dict[tuple[str, str], dict[str, StepTiming]]:
    """The timings of both, without others on a device whose baseline we timed in another session."""
    joined = {key: dict(devices) for key, devices in ours.items()}
    for (size, name), devices in others.items():
        base, theirs = ours.get((size, baseline), {}), others.get((size, baseline), {})
        joined[size, name] = {**comparable_timings(devices, theirs, base), **ours.get((size, name), {})}
    return joined


def _union_of(before: StudyConfig, study: StudyConfig) -> dict[str, Any]:
    """The combined settings of two studies on the same text."""
    return {
        "variants": {**before.variants, **study.variants},
        "seeds": tuple(sorted({*before.seeds, *study.seeds})),
        "ladder": tuple(sorted({*before.ladder, *study.ladder})),
        "ladder_of": "all" if "all" in (before.ladder_of, study.ladder_of) else "baseline",
        "quantize": tuple(dict.fromkeys((*before.quantize, *study.quantize))),
        "bases": {**(before.bases or {}), **(study.bases or {})} or None,
        "workers": max(before.workers, study.workers),
        "time_alone": before.time_alone or study.time_alone,
        "target": study.target or before.target,
    }


def complete_records(plan: StudyPlan, known: Mapping[PlannedRun, RunRecord]) -> dict[PlannedRun, RunRecord]:
    """The records of the complete runs, from disk or from `known`."""
    local = {run: read_run(run.folder, run.config) for run in plan.runs if is_complete(run.folder, run.config)}
    joined = {run: record.filled(known[run]) if run in known else record for run, record in local.items()}
    return {run: joined.get(run) or known[run] for run in plan.runs if run in local or run in known}


def _joined_config(path: Path, before: StudyConfig, study: StudyConfig) -> StudyConfig:
    """One study with the variants, seeds, sizes and budgets of both."""
    for key in ("baseline", "match", "confidence", "tune"):
        old, new = getattr(before, key), getattr(study, key)
        if old != new:
            if isinstance(old, Frozen) or isinstance(new, Frozen):  # in tables such as `match`, list what differs
                tables = [value.model_dump() if isinstance(value, Frozen) else {} for value in (old, new)]
                names = ("kind", *tables[0], *tables[1])  # the kind says more than its keys
                name = next(name for name in names if tables[0].get(name) != tables[1].get(name))
                key, (old, new) = f"{key}.{name}", (table.get(name) for table in tables)
            theirs, ours = ("none" if value is None else shown(value) for value in (old, new))
            raise ConfigError(
                f"{path} has {key} = {theirs} and this study {ours}: use the same, or name another file for --results."
            )
    return StudyConfig(
        **{
            **study.model_dump(exclude_none=True),
            **_union_of(before, study),
            "name": before.name,
            "scaling": _joined_scaling(path, before, study),
            "tasks": both_tasks(before.tasks, None if study.tasks is None else study.tasks.anywhere),
        }
    )


def _joined_scaling(path: Path, before: StudyConfig, study: StudyConfig) -> dict[str, object] | None:
    if before.scaling is None and study.scaling is None:
        if before.base == study.base:
            return None
        raise ConfigError(
            f"{path} compares variants of {before.base}, but this study starts from {study.base}, a different "
            "run: start from the same run, or name another file for --results."
        )
    rules = [s.scaling.tokens_per_parameter if s.scaling else None for s in (before, study)]
    if before.scaling is None or study.scaling is None or rules[0] != rules[1]:
        raise ConfigError(
            f"{path} has the sizes {', '.join(before.sizes)} and this study {', '.join(study.sizes)}, scaled "
            "differently: use the same --base, --sizes and --tokens-per-parameter, or name another file for --results."
        )
    return {**study.scaling.model_dump(), "sizes": tuple(dict.fromkeys((*before.sizes, *study.sizes)))}


def _check_models(path: Path, before: StudyPlan, plan: StudyPlan, records: Mapping[PlannedRun, RunRecord]) -> None:
    """Refuse a model whose settings differ; initial weights may lie elsewhere if their content is the same.

    Missing weights do not conflict: no run can start from them.
    """
    for key in (key for key in before.models if key in plan.models):
        saved, planned = before.models[key].config, plan.models[key].config
        start = planned.train.start
        began = {r.environment.get(START) for run, r in records.items() if (run.size, run.variant) == key} - {None}
        moved = start is not None and bool(began) and weights_fingerprint(start) in (None, *began)
        same = ("train.start",) if moved or same_place(saved.train.start, start) else ()
        old, new = (settings(each, without=(*PLACE, "data.seed", "train.seed", *same)) for each in (saved, planned))
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                raise ConfigError(
                    f"{path} has {key[1]} with {name} = {old.get(name)!r}, but this study needs {new.get(name)!r}: "
                    "give the variant another name, or name another file for --results."
                )


def _check_records(path: Path, known: Mapping[PlannedRun, RunRecord]) -> None:
    """Refuse a run whose results differ between the study's folder and the saved study."""
    for run, saved in known.items():
        if is_complete(run.folder, run.config):
            local = read_run(run.folder, run.config)
            if local.loss_curve != saved.loss_curve:
                raise ConfigError(
                    f"{run.folder} ends with a loss of {local.final_loss:.6f}, but the same run in {path} with "
                    f"{saved.final_loss:.6f}: remove that folder, or name another file for --results."
                )


def settle(study: StudyConfig, out: Path, results: Path | None = None) -> StudyConfig:
    """The study as it starts: with the measurements of an earlier one in its folder, and with base files embedded.

    A base gets the name that the results file or the folder uses for the same content.
    """
    known: dict[str, dict[str, Any]] = {}
    for file in (out / STUDY, out / STARTED):
        if file.exists():
            known |= StudyConfig.from_toml(file).bases or {}
    if results is not None and results.exists():
        known = {**(SavedStudy.read(results).config.bases or {}), **known}
    return name_bases(with_earlier(study, out), known).model_copy(update={"set": local_changes(study.set)})


def with_earlier(study: StudyConfig, out: Path) -> StudyConfig:
    """The study with the recipes, tasks and rate search of an earlier one in its folder, so that a rerun keeps them."""
    if not (out / STUDY).exists():
        return study
    earlier = StudyConfig.from_toml(out / STUDY)
    stated = "calibration" in study.model_fields_set or not earlier.quantize
    update = {
        "quantize": tuple(dict.fromkeys((*earlier.quantize, *study.quantize))),
        "calibration": study.calibration if stated else earlier.calibration,
        "tasks": both_tasks(earlier.tasks, study.tasks),
        "tune": study.tune or earlier.tune,
    }
    return study.model_copy(update=update)


def both_tasks(earlier: Tasks | None, tasks: Tasks | None) -> Tasks | None:
    """The tasks of both, unless the way of scoring them has changed."""
    if tasks is None or earlier is None:
        return tasks or earlier
    if earlier != tasks.model_copy(update={"names": earlier.names}):
        return tasks
    return tasks.model_copy(update={"names": tuple(dict.fromkeys((*earlier.names, *tasks.names)))})


def name_bases(study: StudyConfig, known: Mapping[str, dict[str, Any]]) -> StudyConfig:
    """Embed the content of the files that `base` or `sizes` name, so that the study can resume without them.

    A file gets the name that `known` has for the same content, or else a short one.
    """
    stored, names, bases = study.bases or {}, {}, dict(study.bases or {})
    for size in study.sizes:
        if size not in stored and not size.endswith(".toml"):
            continue
        base = bases.pop(size, None) or RunConfig.find(size).model_dump(mode="json", exclude_none=True)
        same = [name for name, other in known.items() if _content(other) == _content(base)]
        short = size if size in stored else _short_name(size, several=study.scaling is not None)
        chosen = next((name for name in (*same, short) if name not in bases), size)
        names[size], bases[chosen] = chosen, base
    changes: dict[str, Any] = {"bases": bases or None}
    if study.scaling is None:
        changes["base"] = names.get(study.base, study.base)
    else:
        sizes = tuple(names.get(size, size) for size in study.scaling.sizes)
        changes["scaling"] = study.scaling.model_copy(update={"sizes": sizes})
    return study.model_copy(update=changes)


def _short_name(file: str, several: bool) -> str:
    """The name of a base's file, or for a run's config.toml that of its folder, unless the study has several sizes."""
    path = Path(file)
    folder = path.resolve().parent.name
    return f"{folder}.toml" if path.name == "config.toml" and not several and is_plain_name(folder) else path.name


def _content(base: Mapping[str, Any]) -> object:
    """The settings of a base, except paths; None if it cannot be built on this machine."""
    with suppress(ConfigError):
        return settings(RunConfig(**base), without=("data.path", *PATHS))
    return None


class _ResultsLink(Shape):
    results: str


def link_results(out: Path, results: Path | None) -> None:
    """Record the relative path of the results file in the study's folder; without one, remove an earlier record."""
    if results is None:
        (out / EXTENDED).unlink(missing_ok=True)
        return
    content = {"results": os.path.relpath(results.resolve(), out.resolve())}
    write_atomically(out / EXTENDED, json.dumps(content) + "\n", parents=True)


def linked_results(out: Path) -> Path | None:
    """The results file linked to the study in a folder, even if it no longer exists; None if none was linked."""
    try:
        written = read_json(inside(out, EXTENDED), _ResultsLink, "").results
    except ReadError:
        return None
    return Path(os.path.relpath(out.resolve() / written))
