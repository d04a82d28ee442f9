"""A study's numbers, without its weights, in one small file that suffices to redraw every table and picture.

It holds the study and the configurations of its models. For every complete run it holds the curves, speed, memory,
versions and hardware, and the measurements of the trained model: outliers, low precision, task accuracies, inspection.
A later study can extend it (`extend_study.py`), even on a machine that has only this file. Its paths are portable:
relative to the working folder, or only the last component.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from residua.config.run import RunConfig
from residua.config.settings import ConfigError, Frozen
from residua.errors import UserError
from residua.files import write_atomically
from residua.reading import check, parse_toml_value, read_json, reason, refuse, shown, toml_string
from residua.report.figures import evenly
from residua.study.collect_results import collect
from residua.study.config import StudyConfig, Tasks
from residua.study.plan import (
    RUNS,
    PlannedModel,
    PlannedRun,
    StudyPlan,
    TunedRate,
    model_title,
    rate_changes,
    tuned_for,
)
from residua.study.records import Accuracies, Inspection, Outliers, Peaks, QuantizedRun, RunRecord
from residua.study.results import DatasetFacts, StudyResult
from residua.study.timing import StepTiming, comparable_with_any
from residua.train.environment import START
from residua.train.result import FinalValidation

NOWHERE = Path(os.devnull)
"""Stands for a study without a folder: no file is found in it."""
FORMAT = "residua-study-results"
HINT = "restore it, or write it again with --results"
POINTS = 60
"""How many points of a training curve are stored; all validations are stored."""
ENVIRONMENT = (
    "residua", "mathematics", "commit", "python", "torch", "triton", "cuda", "gpu", "processor", "threads", START,
)  # fmt: skip

Timings = Mapping[tuple[str, str], Mapping[str, StepTiming]]
"""By (size, variant), then by device."""
PATHS = ("train.start", "data.tokenizer")
"""Settings whose value may be a path."""
OF_THE_MODEL = ("outliers", "accuracies", "quantized", "final")
"""Fields about the trained model that a saved run shares with its record."""


class Points(Frozen):
    """A curve stored as columns. `seconds` of training and `bits_per_byte` are empty if they were not measured."""

    step: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    bits_per_byte: tuple[float, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """The columns that every row has."""
        columns = {
            key: tuple(row[key] for row in rows)
            for key in cls.model_fields
            if all(key in row and not (isinstance(row[key], float) and math.isnan(row[key])) for row in rows)
        }
        return cls(**columns)

    def rows(self, kind: str, tokens_per_step: int) -> list[dict[str, Any]]:
        """The rows in the form of metrics.jsonl; missing measurements are NaN."""
        names = [key for key in Points.model_fields if key != "step"]
        columns = {key: getattr(self, key) or [math.nan] * len(self.step) for key in names}
        return [
            {"kind": kind, "step": step, "tokens": step * tokens_per_step, **{k: v[i] for k, v in columns.items()}}
            for i, step in enumerate(self.step)
        ]


class SavedModel(Frozen):
    """A variant at one size; `config` is that of its runs without seed, budget and paths."""

    size: str
    variant: str
    overrides: tuple[str, ...]
    matching: str
    parameters: int
    flops_per_token: float
    config: dict[str, Any]
    timings: dict[str, StepTiming] = Field(default_factory=dict, description="its step timed alone, by device")


class SavedRun(Frozen):
    """A complete run. `environment` is an index into the study's list."""

    size: str
    variant: str
    seed: int
    budget: float
    steps: int
    environment: int
    started: str = ""
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    train: Points = Points()
    validation: Points
    train_loss: float | None = None
    peaks: Peaks | None = None
    outliers: Outliers | None = None
    accuracies: Accuracies | None = None
    quantized: QuantizedRun | None = None
    inspection: Inspection | None = None
    final: FinalValidation | None = Field(None, description="the last validation, on the whole text, by document")


class SavedStudy(Frozen):
    """The content of a results file, version 1."""

    format: Literal["residua-study-results"] = "residua-study-results"
    version: Literal[1] = 1
    commands: tuple[str, ...] = ()
    study: dict[str, Any]
    fingerprint: str
    dataset: DatasetFacts | None = None
    environments: tuple[dict[str, Any], ...] = ()
    models: tuple[SavedModel, ...]
    tuning: tuple[TunedRate, ...] | None = Field(None, description="what a learning rate search tried and chose")
    tasks: Tasks | None = Field(None, description="the tasks of the last scoring, without paths of local files")
    runs: tuple[SavedRun, ...]
    checksum: str = Field("", description="checksum of models, runs, environments and text, to detect a damaged file")

    @classmethod
    def read(cls, path: Path) -> SavedStudy:
        """Read and check a file; errors say what is wrong with it."""
        content = read_json(path, dict[str, Any], HINT)
        if "format" not in content and {"baseline", "confidence", "variants"} <= content.keys():
            refuse(
                f"{path} is the summary in a study's folder, not a file written by --results",
                f"make one with `residua compare {path.parent} --results FILE.json`",
            )
        if content.get("format") != FORMAT:
            refuse(f"{path} does not hold the results of a study", "name a file that --results wrote")
        if content.get("version") != 1:
            refuse(f"{path} has version {shown(content.get('version'))}, this Residua reads 1", "update Residua")
        saved = check(content, cls, path, HINT)
        try:
            saved._check(content)
        except ConfigError as error:  # the file is as it was written
            refuse(
                f"{path} has a model that cannot be built here ({reason(error)})",
                "name its plugin, or update Residua",
            )
        except (ValueError, KeyError) as error:
            refuse(f"{path} is damaged ({reason(error)})", HINT)
        return saved

    def write(self, path: Path) -> None:
        """Write the whole file, one line per run and model."""
        write_atomically(path, self.text(), parents=True)

    def text(self) -> str:
        """The file's content: JSON with one line per run and model, so that changes read well in a diff."""
        parts = []
        content = self.model_dump(mode="json", exclude_none=True)
        for key, value in {**content, "checksum": _checksum(content)}.items():
            if key in ("environments", "models", "runs", "commands"):
                lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in value)
                parts.append(f' "{key}": [\n{lines}\n ]' if lines else f' "{key}": []')
            else:
                parts.append(f' "{key}": {json.dumps(value, ensure_ascii=False)}')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @property
    def config(self) -> StudyConfig:
        """The study's configuration; the paths of its text and tasks are unknown."""
        return StudyConfig(**{**self.study, "tasks": self.tasks})

    @property
    def timings(self) -> dict[tuple[str, str], dict[str, StepTiming]]:
        """Steps timed alone, by (size, variant), then by device."""
        return {(model.size, model.variant): model.timings for model in self.models}

    def rates(self) -> list[TunedRate]:
        """The chosen learning rates, with search identities recomputed by this version of Residua.

        Keys that this version adds to a run, left at their defaults, therefore do not invalidate a search.
        """
        study, models = self.config, self.plan(NOWHERE).models
        if study.tune is None:
            return list(self.tuning or ())
        rates = []
        for rate in self.tuning or ():
            config = models[rate.size, rate.variant].config
            made_for = tuned_for(config.override(rate_changes(config, 1 / rate.chosen)), study.tune)
            rates.append(rate.model_copy(update={"made_for": made_for}))
        return rates

    def plan(self, out: Path, text: str | None = None) -> StudyPlan:
        """The models and the complete runs; folders are those that a study in `out` would use.

        `text` is the folder of their text, which the file does not record; None: the embedded corpus.
        """
        study = self.config
        models = {
            (model.size, model.variant): PlannedModel(
                RunConfig(**model.config | {"data": model.config["data"] | {"path": text}}),
                model.overrides, model.matching, model.parameters, model.flops_per_token,
            )
            for model in self.models
        }  # fmt: skip
        runs = []
        for run in self.runs:
            title = model_title(study, run.size, run.variant) + (f"-{run.budget:g}x" if run.budget != 1.0 else "")
            seeded = [f"train.seed={run.seed}", f"data.seed={run.seed}", f"train.steps={run.steps}"]
            config = models[run.size, run.variant].config.override(seeded)
            folder = out / RUNS / f"{title}-seed{run.seed}"
            runs.append(PlannedRun(run.variant, run.size, run.seed, config, folder, run.budget))
        tokens = self.dataset.train_tokens if self.dataset else 0
        return StudyPlan(models, tuple(runs), tokens, self.tuning or ())

    def records(self, plan: StudyPlan) -> dict[PlannedRun, RunRecord]:
        """The records of the runs of `plan`, which `self.plan` returned."""
        return {run: self._record(run, saved) for run, saved in zip(plan.runs, self.runs, strict=True)}

    def _record(self, run: PlannedRun, saved: SavedRun) -> RunRecord:
        per_step = run.config.tokens_per_step
        return RunRecord(
            run.folder,
            per_step,
            saved.train.rows("train", per_step),
            saved.validation.rows("validation", per_step),
            None if saved.inspection is None else saved.inspection.sections,
            environment={**self.environments[saved.environment], "sessions": [{"started": saved.started}]},
            tokens_per_second=math.nan if saved.tokens_per_second is None else saved.tokens_per_second,
            memory_gib=math.nan if saved.memory_gib is None else saved.memory_gib,
            train_loss=math.nan if saved.train_loss is None else saved.train_loss,
            telemetry=[] if saved.peaks is None else saved.peaks.telemetry(per_step),
            **{key: getattr(saved, key) for key in OF_THE_MODEL},
        )

    def result(self, out: Path = NOWHERE, baseline: str | None = None) -> StudyResult:
        """Collect the results of the study, whose folder is `out` if it has one.

        With `baseline` they are relative to that variant; the runs, and what models were matched to, stay the same.
        """
        plan, study = self.plan(out), self.config
        if baseline is None or baseline == study.baseline:
            return collect(study, plan, self.records(plan), {}, self.dataset, self.timings)
        self._refuse_baseline_without_runs(baseline)
        timings, other = comparable_with_any(self.timings, study.baseline), {"baseline": baseline}
        result = collect(study.model_copy(update=other), plan, self.records(plan), {}, self.dataset, timings)
        return result.model_copy(update={"own_baseline": study.baseline})

    def _refuse_baseline_without_runs(self, baseline: str) -> None:
        planned = {(model.size, model.variant) for model in self.models}
        trained = {(run.size, run.variant) for run in self.runs if run.budget == 1.0}

        def is_everywhere(name: str) -> bool:
            return all((size, name) in cells for cells in (planned, trained) for size, _ in cells)

        if not is_everywhere(baseline):
            study = self.config
            at = " at every size" * (len(study.sizes) > 1)
            others = ", ".join(name for name in study.variants if is_everywhere(name))
            raise UserError(
                f"the study {study.name} has no complete run of {shown(baseline)}{at} to compare with: choose one of "
                f"{others}."
            )

    def _check(self, content: dict[str, Any]) -> None:
        """Refuse a file that was changed, or whose parts are inconsistent."""
        if self.checksum != _checksum(content):
            raise UserError("its checksum does not match")
        plan = self.plan(Path())
        keys: set[object] = set()
        for run, saved in zip(plan.runs, self.runs, strict=True):
            if run.key in keys:
                raise UserError(f"{run.title} occurs twice")
            keys.add(run.key)
            if not saved.validation.step or saved.validation.step[-1] < saved.steps:
                raise UserError(f"{run.title} was not validated at its last step")
            if saved.environment not in range(len(self.environments)):
                raise UserError(f"{run.title} refers to a missing environment")
            if saved.inspection is not None and not saved.inspection.fits(run.config):
                raise UserError(f"{run.title} has the inspection of a different model")


def _checksum(content: Mapping[str, Any]) -> str:
    fields = {key: content.get(key) for key in ("study", "fingerprint", "environments", "models", "runs")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def save_study(
    study: StudyConfig,
    plan: StudyPlan,
    records: Mapping[PlannedRun, RunRecord],
    fingerprint: str,
    dataset: DatasetFacts | None,
    timings: Timings | None = None,
    commands: Iterable[str] = (),
) -> SavedStudy:
    """The complete runs of a study, ready to be written."""
    environments: list[dict[str, Any]] = []
    runs = []
    for run, record in ((run, records[run]) for run in plan.runs if run in records):
        about = {key: record.environment[key] for key in ENVIRONMENT if record.environment.get(key) is not None}
        if about not in environments:
            environments.append(about)
        sessions = record.environment.get("sessions") or [{}]
        runs.append(
            SavedRun(
                size=run.size,
                variant=run.variant,
                seed=run.seed,
                budget=run.budget,
                steps=run.config.train.steps,
                environment=environments.index(about),
                started=sessions[0].get("started", ""),
                train=Points.of(evenly(record.train, POINTS)),
                validation=Points.of(record.validation),
                inspection=Inspection.rounded(record.inspection),
                final=record.final,
                **record.stored,
            )
        )
    bases = {name: portable_run(base) for name, base in (study.bases or {}).items()}
    changes = tuple(_with_path(change, portable) for change in study.set)
    portable_study = study.model_copy(update={"bases": bases or None, "set": changes})
    models = (
        SavedModel(
            size=size, variant=name, overrides=model.overrides, matching=model.matching, parameters=model.parameters,
            flops_per_token=model.flops_per_token, timings=dict((timings or {}).get((size, name), {})),
            config=portable_run(model.config.model_dump(mode="json", exclude_none=True)),
        )
        for (size, name), model in plan.models.items()
    )  # fmt: skip
    return SavedStudy(
        commands=tuple(dict.fromkeys(commands)),
        study=portable_study.model_dump(mode="json", exclude_none=True, exclude={"data", "threads", "tasks"}),
        fingerprint=fingerprint,
        dataset=None if dataset is None else dataset.model_copy(update={"path": Path(dataset.path).name}),
        environments=tuple(environments),
        models=tuple(models),
        tuning=plan.tuned or None,
        tasks=None if study.tasks is None else study.tasks.anywhere,
        runs=tuple(runs),
    )


def portable(path: str) -> str:
    """A portable path: relative to the working folder, or only its last component if it lies outside."""
    place = Path(path)
    if not place.is_absolute():
        return path
    here = Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else place.name


def portable_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a run, without the path of its text and with portable paths."""
    data = {key: value for key, value in run["data"].items() if key != "path"}
    tables = {**run, "data": data, "train": dict(run.get("train", {}))}
    for setting in PATHS:
        section, key = setting.split(".")
        if tables[section].get(key) is not None:
            tables[section][key] = portable(tables[section][key])
    return tables


def local_changes(changes: Iterable[str]) -> tuple[str, ...]:
    """The overrides of a study, with absolute paths for files that exist."""

    def whole(path: str) -> str:
        return str(Path(path).resolve()) if Path(path).exists() else path

    return tuple(_with_path(change, whole) for change in changes)


def same_place(saved: str | None, planned: str | None) -> bool:
    """Whether a saved path, absolute or portable, can be the planned one."""
    if saved is None or planned is None or Path(saved).is_absolute():
        return saved == planned
    return portable(planned) == saved


def _with_path(change: str, write: Callable[[str], str]) -> str:
    """Rewrite the path in an override, if it has one."""
    key, _, text = change.partition("=")
    value = parse_toml_value(text.strip())
    if key.strip() not in PATHS or not isinstance(value, str) or value == write(value):
        return change
    return f"{key.strip()}={toml_string(write(value))}"
