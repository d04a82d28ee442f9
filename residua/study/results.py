"""The results of a study as data: the versioned content of results.json (docs/compare.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from pydantic import Field

from residua.config.settings import Frozen
from residua.study import scaling
from residua.study.config import StudyConfig
from residua.study.plan import RUNS, PlannedRun, StudyPlan
from residua.study.runs import DIAGNOSIS, QuantizedRun, RunRecord
from residua.study.statistics import (
    Estimate,
    estimate,
    estimate_ratio,
    geometric_mean,
    mean,
    paired_difference,
    step_gain,
)

VERSION = 1


class Interval(Frozen):
    """A mean over `count` runs, its standard error and its confidence interval; null if there is only one run."""

    value: float
    count: int
    error: float | None = None
    low: float | None = None
    high: float | None = None


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
    quantized: QuantizedRun | None = None
    diagnosis: str | None = Field(None, description="the page of its diagnosis, relative to the study's folder")


class LowPrecision(Frozen):
    """Means over seeds: outliers, and by recipe the loss and its increase over the same model in high precision.

    Null if the loss was not finite for one of the seeds.
    """

    peak_activation: float
    sink_ratio: float
    loss: Interval
    losses: dict[str, Interval | None]
    costs: dict[str, Interval | None]


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
    step_gain: Interval | None = None
    tokens_per_second: float | None = None
    throughput_ratio: Interval | None = None
    wall_clock_gain: Interval | None = None
    memory_gib: float | None = None
    low_precision: LowPrecision | None = None


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
    variants: tuple[VariantResult, ...]
    scaling: tuple[ScalingResult, ...] = ()
    runs: tuple[RunResult, ...]

    def rows(self, size: str | None = None) -> list[VariantResult]:
        """The table's rows, of one size or of all."""
        return [row for row in self.variants if size is None or row.size == size]

    @property
    def sizes(self) -> list[str]:
        """The sizes, smallest first."""
        return list(dict.fromkeys(row.size for row in self.variants))


def collect(
    study: StudyConfig,
    plan: StudyPlan,
    records: dict[PlannedRun, RunRecord],
    problems: dict[PlannedRun, str],
    dataset: DatasetFacts | None = None,
) -> StudyResult:
    """The results of the complete runs; the others are listed with their problem."""
    runs = tuple(_run_result(run, records.get(run), problems.get(run, "")) for run in plan.runs)
    variants = tuple(
        _variant_result(study, plan, records, size, name) for size in study.sizes for name in study.variants
    )
    return StudyResult(
        name=study.name,
        baseline=study.baseline,
        confidence=study.confidence,
        seeds=study.seeds,
        side_by_side=min(study.workers, len(plan.runs)),
        dataset=dataset,
        variants=variants,
        scaling=_scaling(study, runs, variants) if study.scaling else (),
        runs=runs,
    )


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
        tokens_per_second=record.tokens_per_second,
        memory_gib=record.memory_gib,
        quantized=record.quantized,
        diagnosis=f"{RUNS}/{run.folder.name}/{DIAGNOSIS}" if (run.folder / DIAGNOSIS).exists() else None,
    )


def _variant_result(
    study: StudyConfig, plan: StudyPlan, records: dict[PlannedRun, RunRecord], size: str, name: str
) -> VariantResult:
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
    ours, baseline = (_by_seed(records, size, who) for who in (name, study.baseline))
    if not ours:
        return row
    level = study.confidence
    measured = {
        "loss": _interval(estimate([run.final_loss for run in ours.values()], level)),
        "bits_per_byte": _interval(estimate([run.final_bits_per_byte for run in ours.values()], level)),
        "tokens_per_second": geometric_mean([run.tokens_per_second for run in ours.values()]),
        "memory_gib": max(run.memory_gib for run in ours.values()),
        "low_precision": _low_precision(study, [run.quantized for run in ours.values()]),
    }
    if name != study.baseline:
        measured |= _against_baseline(ours, baseline, level)
    return row.model_copy(update=measured)


def _low_precision(study: StudyConfig, found: Sequence[QuantizedRun | None]) -> LowPrecision | None:
    """The low-precision results; None until every run was measured."""
    runs = [run for run in found if run is not None]
    if not study.quantize or len(runs) < len(found) or any(t not in run.losses for run in runs for t in study.quantize):
        return None
    level = study.confidence

    def over_seeds(recipe: str, minus_own: bool) -> Interval | None:
        values = [loss - run.loss * minus_own for run in runs if (loss := run.losses[recipe]) is not None]
        return _interval(estimate(values, level)) if len(values) == len(runs) else None

    loss = _interval(estimate([run.loss for run in runs], level))
    assert loss is not None
    return LowPrecision(
        peak_activation=mean([run.peak_activation for run in runs]),
        sink_ratio=mean([run.sink_ratio for run in runs]),
        loss=loss,
        losses={recipe: over_seeds(recipe, False) for recipe in study.quantize},
        costs={recipe: over_seeds(recipe, True) for recipe in study.quantize},
    )


def _against_baseline(
    ours: dict[int, RunRecord], baseline: dict[int, RunRecord], level: float
) -> dict[str, Interval | None]:
    """Difference, gains and ratios, each from the seeds that both completed."""
    shared = sorted(ours.keys() & baseline.keys())
    gains = {seed: step_gain(ours[seed].loss_curve, baseline[seed].loss_curve) for seed in shared}
    speed = {seed: ours[seed].tokens_per_second / baseline[seed].tokens_per_second for seed in shared}
    reached = {seed: gain for seed, gain in gains.items() if gain is not None}
    return {
        "difference": _interval(
            paired_difference(
                {seed: run.final_loss for seed, run in ours.items()},
                {seed: run.final_loss for seed, run in baseline.items()},
                level,
            )
        ),
        "step_gain": _ratio(list(reached.values()), level),
        "throughput_ratio": _ratio(list(speed.values()), level),
        "wall_clock_gain": _ratio([gain * speed[seed] for seed, gain in reached.items()], level),
    }


def _by_seed(records: dict[PlannedRun, RunRecord], size: str, name: str) -> dict[int, RunRecord]:
    return {r.seed: record for r, record in records.items() if (r.size, r.variant, r.budget) == (size, name, 1.0)}


def _interval(value: Estimate | None) -> Interval | None:
    return None if value is None else Interval(**asdict(value))


def _ratio(values: Sequence[float], level: float) -> Interval | None:
    return _interval(estimate_ratio(values, level)) if values else None


def _scaling(
    study: StudyConfig, runs: Sequence[RunResult], variants: Sequence[VariantResult]
) -> tuple[ScalingResult, ...]:
    """One fit per variant that completed at two sizes or more; advantages at the baseline's largest compute."""
    points = compute_points(runs, variants)
    fits = {name: scaling.fit(found) for name, found in points.items() if len({c for c, _ in found}) > 1}
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
