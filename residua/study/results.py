"""The results of a study as data: results.json, versioned (docs/compare-reference.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from residua.config.settings import Frozen
from residua.study.gains import Race
from residua.study.ladder import FittedLaw
from residua.study.plan import TunedRate
from residua.study.records import Accuracies, Outliers, Peaks, QuantizedRun, RunRecord
from residua.study.statistics import Interval, estimate, mean, paired_difference
from residua.study.timing import StepTiming

Runs = Mapping[int, RunRecord]  # by seed
PROJECTED = 10.0
"""Gains are projected to this multiple of the largest run's compute."""
MEAN = "mean"
"""The key of the mean over all tasks, used alongside task names."""


class RunResult(Frozen):
    """One run: its location, and its measurements or its problem."""

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


class LowPrecision(Frozen):
    """Means over seeds: outliers, and per recipe the loss and its increase over the same model in high precision.

    Null if the loss was not finite for one of the seeds.
    """

    peak_activation: float
    sink_ratio: float
    loss: Interval
    losses: dict[str, Interval | None]
    costs: dict[str, Interval | None]


class OutlierMeans(Frozen):
    """Outliers of the trained models, on validation text; null where a model has no softmax attention."""

    peak_activation: Interval = Field(description="the largest |h| that any sublayer reads")
    sink_ratio: Interval = Field(description="mean |h| of the largest dimension / that of the median dimension")
    attention_sink: Interval | None = Field(None, description="mean attention to the first token, over softmax layers")
    uniform_attention: float | None = Field(None, description="what uniform attention would give the first token")


class TaskMeans(Frozen):
    """Accuracy on one task, or the mean over several, from 0 to 1; `difference` from the baseline is paired by seed."""

    accuracy: Interval
    difference: Interval | None = None
    chance: float | None = Field(None, description="the accuracy of guessing; null if it is not known")


class SourceMeans(Frozen):
    """Bits per byte on the validation text of one source; `difference` is paired with the baseline by seed."""

    bits_per_byte: Interval
    difference: Interval | None = None


class LowTaskMeans(Frozen):
    """The mean accuracy over all tasks in low precision, and its change from the same models in high precision."""

    accuracy: Interval
    change: Interval


class VariantResult(Frozen):
    """One row of the table: a variant at one size. Ratios compare it with the baseline of the same size."""

    name: str
    size: str
    overrides: tuple[str, ...]
    matching: str = Field(description="changes made by parameter matching; empty if none")
    parameters: int
    parameters_ratio: float
    flops_per_token: float
    loss: Interval | None = None
    bits_per_byte: Interval | None = None
    difference: Interval | None = None
    text_error: float | None = Field(None, description="error of the difference from sampling text, paired by document")
    step_gain: Interval | None = None
    equivalent_tokens: Interval | None = Field(None, description="from the ladder: D'/D, the baseline's tokens / ours")
    extrapolated: bool = Field(False, description="D' lies outside the budgets of the ladder at this size")
    equivalent_corrected: Interval | None = Field(None, description="equivalent_tokens after Holm's correction")
    tokens_per_second: float | None = None
    timing: StepTiming | None = Field(None, description="the step timed alone, which then gives throughput_ratio")
    throughput_ratio: Interval | None = None
    wall_clock_gain: Interval | None = Field(None, description="null where speeds are not known well enough")
    corrected: Interval | None = Field(None, description="wall_clock_gain with its interval after Holm's correction")
    difference_corrected: Interval | None = Field(None, description="difference, likewise")
    shrunk: Interval | None = Field(None, description="wall_clock_gain after partial pooling over the variants")
    race: Race | None = Field(None, description="with a target: the cost of reaching that loss")
    memory_gib: float | None = None
    train_loss: Interval | None = Field(None, description="mean over the last 200 steps, at most a tenth of the run")
    outliers: OutlierMeans | None = None
    sources: dict[str, SourceMeans] = Field(default_factory=dict, description="by source of the validation text")
    tasks: dict[str, TaskMeans] = Field(default_factory=dict, description="by task; their mean under `mean`")
    low_tasks: dict[str, LowTaskMeans] = Field(default_factory=dict, description="by recipe, the mean over all tasks")
    low_precision: LowPrecision | None = None


class Rung(Frozen):
    """The baseline's loss after one budget of tokens, trained with that budget's own schedule."""

    tokens: float
    loss: Interval


class LadderResult(Frozen):
    """The baseline at several budgets, smallest first, and the law through them (null with fewer than three)."""

    size: str
    rungs: tuple[Rung, ...]
    law: FittedLaw | None = None


class JointLaw(Frozen):
    """L = E + A·N^−a + B·D^−b through the baseline's sizes and budgets.

    `parameters` is N by size: matrices and head, as compute counts them. `tokens` has B and b, and the floor of the
    largest size; `size` has E, A and a, null with fewer than three sizes. `compute` is L = E + A·C^−α fitted to the
    runs at the study's own budget, also null with fewer than three sizes.
    """

    parameters: dict[str, int]
    tokens: FittedLaw
    size: FittedLaw | None = None
    compute: FittedLaw | None = None


class ProjectedGain(Frozen):
    """A variant's gain at `compute`, ten times that of the baseline's largest run, with the same tokens per parameter.

    `seconds` assumes the speed of the largest size. `trend` is the factor by which the gain changes per tenfold
    compute.
    """

    name: str
    compute: float
    tokens: Interval
    trend: Interval
    corrected: Interval | None = Field(None, description="tokens with its interval after Holm's correction")
    seconds: Interval | None = Field(
        None, description="null where the speed at the largest size is not known well enough"
    )
    seconds_corrected: Interval | None = None


class ScalingResult(Frozen):
    """L = scale · compute^−exponent for one variant; `advantage` is the baseline's compute / ours for the same loss."""

    name: str
    scale: float
    exponent: float
    at_compute: float
    advantage: Interval | None = None


class DatasetFacts(Frozen):
    """Facts about the text, for judging the losses."""

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
    own_baseline: str | None = Field(None, description="the study's own, if results are relative to another variant")
    confidence: float
    seeds: tuple[int, ...]
    side_by_side: int = Field(description="runs that shared the machine while speeds were measured")
    dataset: DatasetFacts | None = None
    validated_tokens: int | None = Field(None, description="validation tokens for final losses")
    curve_tokens: int | None = Field(None, description="validation tokens for curves and step-wise gains")
    target: float | None = Field(None, description="the validation loss of the race")
    variants: tuple[VariantResult, ...]
    ladder: tuple[LadderResult, ...] = ()
    scaling: tuple[ScalingResult, ...] = ()
    joint: JointLaw | None = Field(None, description="with several sizes and a ladder, the law of both")
    projected: tuple[ProjectedGain, ...] = ()
    tuning: tuple[TunedRate, ...] = Field((), description="what the learning rate search tried and chose")
    lacking: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="under tasks and quantize, the complete runs without that measurement"
    )
    runs: tuple[RunResult, ...]

    def rows(self, size: str | None = None) -> list[VariantResult]:
        """The table's rows, of one size or of all."""
        return [row for row in self.variants if size is None or row.size == size]

    def complete(self, size: str, variant: str) -> list[RunResult]:
        """The complete runs of a variant at a size, excluding the ladder."""
        wanted = (size, variant, 1.0, "complete")
        return [run for run in self.runs if (run.size, run.variant, run.budget, run.status) == wanted]

    @property
    def sizes(self) -> list[str]:
        """The sizes, smallest first."""
        return list(dict.fromkeys(row.size for row in self.variants))


def low_precision(recipes: Sequence[str], measured: Sequence[QuantizedRun | None], level: float) -> LowPrecision | None:
    """The low-precision results; None until every run is measured."""
    runs = [run for run in measured if run is not None]
    if not recipes or len(runs) < len(measured) or any(name not in run.losses for run in runs for name in recipes):
        return None

    def over_seeds(recipe: str, minus_own: bool) -> Interval | None:
        values = [loss - run.loss * minus_own for run in runs if (loss := run.losses[recipe]) is not None]
        return estimate(values, level) if len(values) == len(runs) else None

    return LowPrecision(
        peak_activation=mean([run.peak_activation for run in runs]),
        sink_ratio=mean([run.sink_ratio for run in runs]),
        loss=estimate([run.loss for run in runs], level),
        losses={recipe: over_seeds(recipe, False) for recipe in recipes},
        costs={recipe: over_seeds(recipe, True) for recipe in recipes},
    )


def outlier_means(ours: Runs, level: float) -> OutlierMeans | None:
    """The outliers of the measured runs; None if there are none."""
    runs = [run.outliers for run in ours.values() if run.outliers is not None]
    if not runs:
        return None
    sinks = [run.attention_sink for run in runs if run.attention_sink is not None]
    return OutlierMeans(
        peak_activation=estimate([run.peak_activation for run in runs], level),
        sink_ratio=estimate([run.sink_ratio for run in runs], level),
        attention_sink=estimate(sinks, level) if sinks else None,
        uniform_attention=runs[0].uniform_attention,
    )


def source_means(ours: Runs, baseline: Runs, level: float) -> dict[str, SourceMeans]:
    """Means per source of the validation text, over the runs that were validated by source."""
    names = dict.fromkeys(name for run in ours.values() if run.final is not None for name in run.final.sources)

    def by_seed(runs: Runs, name: str) -> dict[int, float]:
        finals = {seed: run.final.sources for seed, run in runs.items() if run.final is not None}
        return {seed: sources[name].bits_per_byte for seed, sources in finals.items() if name in sources}

    return {
        name: SourceMeans(
            bits_per_byte=estimate(list(by_seed(ours, name).values()), level),
            difference=paired_difference(by_seed(ours, name), by_seed(baseline, name), level),
        )
        for name in names
    }


def task_means(ours: Runs, baseline: Runs | None, names: Sequence[str], level: float) -> dict[str, TaskMeans]:
    """Means per task over the runs that have it, and under MEAN if there are several tasks."""
    means = {}
    first = next(iter(ours.values())).accuracies
    for name in [*([MEAN] if len(names) > 1 else []), *names]:
        values = accuracies(ours, name, names)
        if not values:
            continue
        tasks = names if name == MEAN else [name]
        chances = [first.tasks[task].chance for task in tasks if first is not None and task in first.tasks]
        guessed = [chance for chance in chances if chance is not None]
        means[name] = TaskMeans(
            accuracy=estimate(list(values.values()), level),
            difference=paired_difference(values, accuracies(baseline or {}, name, names), level),
            chance=mean(guessed) if guessed and len(guessed) == len(tasks) else None,
        )
    return means


def low_task_means(ours: Runs, recipes: Sequence[str], level: float) -> dict[str, LowTaskMeans]:
    """Means per recipe, over the runs scored on every task both with it and in high precision."""
    scored, means = [run.accuracies for run in ours.values() if run.accuracies is not None], {}
    for recipe in recipes:
        both = [(each.mean_in(recipe), each.mean_in()) for each in scored]
        pairs = [(low, high) for low, high in both if low is not None and high is not None]
        if pairs:
            means[recipe] = LowTaskMeans(
                accuracy=estimate([low for low, _ in pairs], level),
                change=estimate([low - high for low, high in pairs], level),
            )
    return means


def accuracies(runs: Runs, name: str, names: Sequence[str]) -> dict[int, float]:
    """The accuracy on a task by seed, or for MEAN the mean over `names`; runs that lack a task are omitted."""
    wanted = names if name == MEAN else [name]
    return {
        seed: mean([run.accuracies.tasks[task].value for task in wanted])
        for seed, run in runs.items()
        if run.accuracies is not None and all(task in run.accuracies.tasks for task in wanted)
    }
