"""The results of a study as data: the versioned content of results.json (docs/compare.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from residua.config.settings import Frozen
from residua.data.loader import validated_tokens
from residua.study import scaling
from residua.study.config import StudyConfig
from residua.study.gains import Timings, compare
from residua.study.inference import concluded
from residua.study.ladder import Gain, fit_law
from residua.study.measures import Interval as Interval
from residua.study.measures import LowPrecision as LowPrecision
from residua.study.measures import (
    LowTaskMeans,
    OutlierMeans,
    TaskMeans,
    interval,
    lacking,
    low_precision,
    low_task_means,
    outlier_means,
    over_runs,
    task_means,
    task_names,
    text_error,
)
from residua.study.peaks import Peaks
from residua.study.plan import RUNS, PlannedRun, StudyPlan
from residua.study.runs import DIAGNOSIS, Accuracies, Outliers, QuantizedRun, RunRecord, comparable, known
from residua.study.statistics import Estimate, estimate, geometric_mean, paired_difference
from residua.study.timing import StepTiming
from residua.study.trials import TunedRate

VERSION = 1


class RunResult(Frozen):
    """One run: where it is, and its measurements or its problem."""

    variant: str
    size: str
    seed: int
    budget: float = Field(1.0, description="share of the study's steps; not 1 for runs of the ladder")
    folder: str
    status: Literal["complete", "failed", "missing"]
    problem: str = ""
    loss: float | None = None
    bits_per_byte: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    train_loss: float | None = Field(None, description="mean over the last 200 steps, at most a tenth of the run")
    peaks: Peaks | None = Field(None, description="the largest |h| over layers while it trained, from telemetry")
    outliers: Outliers | None = None
    accuracies: Accuracies | None = None
    quantized: QuantizedRun | None = None
    diagnosis: str | None = Field(None, description="the page of its diagnosis, relative to the study's folder")


class VariantResult(Frozen):
    """One row of the table: a variant at one size. Ratios compare it with the baseline of the same size."""

    name: str
    size: str
    overrides: tuple[str, ...]
    matching: str = Field(description="what parameter matching changed; empty if nothing")
    parameters: int
    parameters_ratio: float
    flops_per_token: float
    loss: Interval | None = None
    bits_per_byte: Interval | None = None
    difference: Interval | None = None
    text_error: float | None = Field(None, description="of the difference, from sampling text: paired by document")
    step_gain: Interval | None = None
    equivalent_tokens: Interval | None = Field(None, description="from the ladder: D'/D, the baseline's tokens / ours")
    extrapolated: bool = Field(False, description="D' lies outside the budgets of the ladder")
    tokens_per_second: float | None = None
    timing: StepTiming | None = Field(None, description="the step timed alone; throughput_ratio is then from it")
    throughput_ratio: Interval | None = None
    wall_clock_gain: Interval | None = Field(None, description="null where the speeds do not allow to state it")
    corrected: Interval | None = Field(None, description="wall_clock_gain with its interval after Holm's correction")
    difference_corrected: Interval | None = Field(None, description="difference, likewise")
    shrunk: Interval | None = Field(None, description="wall_clock_gain after partial pooling over the variants")
    memory_gib: float | None = None
    train_loss: Interval | None = Field(None, description="mean over the last 200 steps, at most a tenth of the run")
    outliers: OutlierMeans | None = None
    tasks: dict[str, TaskMeans] = Field(default_factory=dict, description="by task; their mean under `mean`")
    low_tasks: dict[str, LowTaskMeans] = Field(default_factory=dict, description="by recipe, the mean over all tasks")
    low_precision: LowPrecision | None = None


class Rung(Frozen):
    """The baseline's loss after one budget of tokens, trained with that budget's own schedule."""

    tokens: float
    loss: Interval


class FittedLaw(Frozen):
    """L(D) = floor + scale·D^−exponent, D in tokens."""

    floor: float
    scale: float
    exponent: float


class LadderResult(Frozen):
    """The baseline at several budgets, smallest first, and the law through them (null with fewer than three)."""

    size: str
    rungs: tuple[Rung, ...]
    law: FittedLaw | None = None


class ScalingResult(Frozen):
    """L = scale · compute^−exponent for one variant; `advantage` is the baseline's compute / ours for the same loss."""

    name: str
    scale: float
    exponent: float
    at_compute: float
    advantage: Interval | None = None


class DatasetFacts(Frozen):
    """Facts about the text, to compare the losses with."""

    path: str
    vocab_size: int
    train_tokens: int
    validation_tokens: int
    bytes_per_token: float
    unigram_entropy: float = Field(description="nats per token of a model that knows only token frequencies")


class StudyResult(Frozen):
    """The content of results.json."""

    version: Literal[1] = 1
    name: str
    baseline: str
    confidence: float
    seeds: tuple[int, ...]
    side_by_side: int = Field(description="runs that shared the machine while speeds were measured")
    dataset: DatasetFacts | None = None
    validated_tokens: int | None = Field(None, description="validation tokens that every loss is measured on")
    variants: tuple[VariantResult, ...]
    ladder: tuple[LadderResult, ...] = ()
    scaling: tuple[ScalingResult, ...] = ()
    tuning: tuple[TunedRate, ...] = Field((), description="what the search of a learning rate tried, and chose")
    lacking: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="under tasks and quantize, the complete runs that were not so measured"
    )
    runs: tuple[RunResult, ...]

    def rows(self, size: str | None = None) -> list[VariantResult]:
        """The table's rows, of one size or of all."""
        return [row for row in self.variants if size is None or row.size == size]

    def complete(self, size: str, variant: str) -> list[RunResult]:
        """The complete runs of a variant at a size, without those of the ladder."""
        own = (size, variant, 1.0, "complete")
        return [run for run in self.runs if (run.size, run.variant, run.budget, run.status) == own]

    @property
    def sizes(self) -> list[str]:
        """The sizes, smallest first."""
        return list(dict.fromkeys(row.size for row in self.variants))


@dataclass(frozen=True)
class Measured:
    """The complete runs, and the steps timed alone by (size, variant)."""

    records: dict[PlannedRun, RunRecord]
    timings: Mapping[tuple[str, str], Timings]


def collect(
    study: StudyConfig,
    plan: StudyPlan,
    records: dict[PlannedRun, RunRecord],
    problems: dict[PlannedRun, str],
    dataset: DatasetFacts | None = None,
    timings: Mapping[tuple[str, str], Timings] | None = None,
) -> StudyResult:
    """The results of the complete runs; the others are listed with their problem.

    `timings` are those of steps timed alone, by (size, variant).
    """
    records = comparable(records)
    measured = Measured(records, timings or {})
    runs = tuple(_run_result(run, records.get(run), problems.get(run, "")) for run in plan.runs)
    compared = [record for run, record in records.items() if run.budget == 1.0]
    variants = tuple(
        _variant_result(study, plan, measured, size, name) for size in study.sizes for name in study.variants
    )
    result = StudyResult(
        name=study.name,
        baseline=study.baseline,
        confidence=study.confidence,
        seeds=study.seeds,
        side_by_side=min(study.workers, len(plan.runs)),
        dataset=dataset,
        validated_tokens=_validated_tokens(plan, records, dataset),
        variants=variants,
        ladder=tuple(found for size in study.sizes if (found := _ladder(study, measured, size)) is not None),
        scaling=_scaling(study, runs, variants) if study.scaling else (),
        tuning=plan.tuned,
        lacking=lacking(compared, study.tasks is not None, study.quantize),
        runs=runs,
    )
    return concluded(result)


def _validated_tokens(
    plan: StudyPlan, records: Mapping[PlannedRun, RunRecord], dataset: DatasetFacts | None
) -> int | None:
    """The validation tokens that the last losses are on: all, or the fixed part; None without a text."""
    finals = [record.final for record in records.values() if record.final is not None]
    if finals:
        return finals[0].tokens
    if dataset is None:
        return None
    config = next(iter(plan.models.values())).config
    return validated_tokens(dataset.validation_tokens, config.sequence, config.data.validation_tokens)


def _run_result(run: PlannedRun, record: RunRecord | None, problem: str) -> RunResult:
    where = {
        "variant": run.variant, "size": run.size, "seed": run.seed, "folder": run.folder.name, "budget": run.budget,
    }  # fmt: skip
    if record is None:
        return RunResult(**where, status="failed" if problem else "missing", problem=problem)
    return RunResult(
        **where,
        status="complete",
        loss=record.final_loss,
        bits_per_byte=record.final_bits_per_byte,
        tokens=record.tokens,
        tokens_per_second=known(record.tokens_per_second),
        memory_gib=known(record.memory_gib),
        train_loss=known(record.train_loss),
        peaks=Peaks.of(record.telemetry),
        outliers=record.outliers,
        accuracies=record.accuracies,
        quantized=record.quantized,
        diagnosis=f"{RUNS}/{run.folder.name}/{DIAGNOSIS}" if (run.folder / DIAGNOSIS).exists() else None,
    )


def _variant_result(study: StudyConfig, plan: StudyPlan, measured: Measured, size: str, name: str) -> VariantResult:
    model, reference = plan.models[size, name], plan.models[size, study.baseline]
    row = VariantResult(
        name=name,
        size=size,
        overrides=model.overrides,
        matching=model.matching,
        parameters=model.parameters,
        parameters_ratio=model.parameters / reference.parameters,
        flops_per_token=model.flops_per_token,
    )
    ours = _by_seed(measured.records, size, name)
    if not ours:
        return row
    level = study.confidence
    timings = list(measured.timings.get((size, name), {}).values())
    found = {
        "loss": _interval(estimate([run.final_loss for run in ours.values()], level)),
        "bits_per_byte": _interval(estimate([run.final_bits_per_byte for run in ours.values()], level)),
        "tokens_per_second": _speed(ours),
        "memory_gib": known(max(run.memory_gib for run in ours.values())),
        "train_loss": over_runs(ours, lambda run: run.train_loss, level),
        "outliers": outlier_means(ours, level),
        "tasks": _tasks(study, measured, size, name),
        "low_tasks": low_task_means(ours, study.quantize, level),
        "low_precision": low_precision(study.quantize, [run.quantized for run in ours.values()], level),
        "timing": timings[-1] if timings else None,
    }
    if name != study.baseline:
        found |= _against_baseline(study, measured, size, name)
    return row.model_copy(update=found)


def _tasks(study: StudyConfig, measured: Measured, size: str, name: str) -> dict[str, TaskMeans]:
    names = task_names(list(measured.records.values()))
    baseline = None if name == study.baseline else _by_seed(measured.records, size, study.baseline)
    return task_means(_by_seed(measured.records, size, name), baseline, names, study.confidence)


def _against_baseline(study: StudyConfig, measured: Measured, size: str, name: str) -> dict[str, Any]:
    """Difference, gains and ratios: paired by seed where both completed it."""
    ours, baseline = (_by_seed(measured.records, size, who) for who in (name, study.baseline))
    difference = paired_difference(_losses(ours), _losses(baseline), study.confidence)
    timed, baseline_timed = (measured.timings.get((size, who), {}) for who in (name, study.baseline))
    found = compare(ours, baseline, _rungs(study, measured, size), timed, baseline_timed, study.confidence)
    return {
        "difference": _interval(difference),
        "text_error": text_error(ours, baseline),
        "step_gain": _interval(found.step),
        "equivalent_tokens": _interval(found.equivalent),
        "extrapolated": found.equivalent is not None and found.equivalent.extrapolated,
        "tokens_per_second": _speed(_with_speed(ours, baseline)) or _speed(ours),
        "throughput_ratio": _interval(found.throughput),
        "wall_clock_gain": _interval(found.wall_clock),
        "timing": found.timing,
    }


def _rungs(study: StudyConfig, measured: Measured, size: str) -> dict[float, dict[int, float]]:
    """The baseline's final losses by tokens and seed, at every budget; empty without a ladder."""
    found: dict[float, dict[int, float]] = {}
    for run, record in measured.records.items():
        if study.ladder and (run.size, run.variant) == (size, study.baseline):
            found.setdefault(float(record.tokens), {})[run.seed] = record.final_loss
    return found if len(found) > 1 else {}


def _ladder(study: StudyConfig, measured: Measured, size: str) -> LadderResult | None:
    found = _rungs(study, measured, size)
    if not found:
        return None
    means = {tokens: estimate(list(losses.values()), study.confidence) for tokens, losses in sorted(found.items())}
    law = fit_law(found)
    return LadderResult(
        size=size,
        rungs=tuple(Rung(tokens=tokens, loss=interval(loss)) for tokens, loss in means.items()),
        law=None if law is None else FittedLaw(**asdict(law)),
    )


def _losses(runs: dict[int, RunRecord]) -> dict[int, float]:
    return {seed: run.final_loss for seed, run in runs.items()}


def _by_seed(records: dict[PlannedRun, RunRecord], size: str, name: str) -> dict[int, RunRecord]:
    return {r.seed: record for r, record in records.items() if (r.size, r.variant, r.budget) == (size, name, 1.0)}


def _speed(ours: Mapping[int, RunRecord]) -> float | None:
    """The mean of the speeds that are known; a run trained beside other work has none."""
    speeds = [run.tokens_per_second for run in ours.values() if math.isfinite(run.tokens_per_second)]
    return geometric_mean(speeds) if speeds else None


def _with_speed(ours: Mapping[int, RunRecord], baseline: Mapping[int, RunRecord]) -> dict[int, RunRecord]:
    """Our runs of the seeds at which the baseline's speed is known: those that the throughput is compared by."""
    return {s: run for s, run in ours.items() if s in baseline and math.isfinite(baseline[s].tokens_per_second)}


def _interval(value: Estimate | Gain | None) -> Interval | None:
    return None if value is None else interval(value)


def _scaling(
    study: StudyConfig, runs: Sequence[RunResult], variants: Sequence[VariantResult]
) -> tuple[ScalingResult, ...]:
    """One fit per variant that completed at two sizes or more; advantages at the baseline's largest compute."""
    points = compute_points(runs, variants)
    laws = {name: scaling.fit(found) for name, found in points.items() if len({c for c, _ in found}) > 1}
    fits = {name: law for name, law in laws.items() if math.isfinite(law.scale)}
    if study.baseline not in fits:
        return ()
    largest = max(compute for compute, _ in points[study.baseline])
    results = []
    for name, law in fits.items():
        gain = scaling.advantage(law, fits[study.baseline], largest, study.confidence)
        results.append(
            ScalingResult(
                name=name,
                scale=law.scale,
                exponent=law.exponent,
                at_compute=largest,
                advantage=None if name == study.baseline else _finite(_interval(gain)),
            )
        )
    return tuple(results)


def compute_points(
    runs: Sequence[RunResult], variants: Sequence[VariantResult]
) -> dict[str, list[tuple[float, float]]]:
    """[(training FLOPs, final loss), ...] of each variant, one point per complete run."""
    flops = {(row.size, row.name): row.flops_per_token for row in variants}
    points: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.loss is not None and run.tokens is not None and run.budget == 1.0:
            compute = flops[run.size, run.variant] * run.tokens
            points.setdefault(run.variant, []).append((compute, run.loss))
    return points


def _finite(interval: Interval | None) -> Interval | None:
    """JSON has no infinity: drop an interval that is not finite."""
    if interval is None or not math.isfinite(interval.value):
        return None
    if interval.high is None or math.isfinite(interval.high):
        return interval
    return interval.model_copy(update={"low": None, "high": None})
