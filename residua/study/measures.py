"""Means over seeds of what is measured in a variant's trained models: accuracies, outliers, losses in low precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field

from residua.config.settings import Frozen
from residua.study.ladder import Gain
from residua.study.runs import QuantizedRun, RunRecord, known
from residua.study.statistics import Estimate, estimate, mean, paired_difference

Runs = Mapping[int, RunRecord]  # by seed


class Interval(Frozen):
    """A mean over `count` runs, its standard error and its confidence interval; null if there is only one run.

    An interval of equivalent tokens can be open: then only one of `low` and `high` is null. `freedom` are its degrees
    of freedom.
    """

    value: float
    count: int
    error: float | None = None
    low: float | None = None
    high: float | None = None
    freedom: float | None = None


class LowPrecision(Frozen):
    """Means over seeds: outliers, and by recipe the loss and its increase over the same model in high precision.

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
    """The accuracy of one task, or the mean of several, as a share; `difference` is to the baseline, paired by seed."""

    accuracy: Interval
    difference: Interval | None = None
    chance: float | None = Field(None, description="the accuracy of guessing; null if it is not known")


class LowTaskMeans(Frozen):
    """The mean accuracy over all tasks in low precision, and its change from the same models in high precision."""

    accuracy: Interval
    change: Interval


MEAN = "mean"
"""The key of the mean over all tasks, beside the names of tasks."""


def low_precision(recipes: Sequence[str], found: Sequence[QuantizedRun | None], level: float) -> LowPrecision | None:
    """The low-precision results; None until every run was measured."""
    runs = [run for run in found if run is not None]
    if not recipes or len(runs) < len(found) or any(name not in run.losses for run in runs for name in recipes):
        return None

    def over_seeds(recipe: str, minus_own: bool) -> Interval | None:
        values = [loss - run.loss * minus_own for run in runs if (loss := run.losses[recipe]) is not None]
        return interval(estimate(values, level)) if len(values) == len(runs) else None

    return LowPrecision(
        peak_activation=mean([run.peak_activation for run in runs]),
        sink_ratio=mean([run.sink_ratio for run in runs]),
        loss=interval(estimate([run.loss for run in runs], level)),
        losses={recipe: over_seeds(recipe, False) for recipe in recipes},
        costs={recipe: over_seeds(recipe, True) for recipe in recipes},
    )


def outlier_means(ours: Runs, level: float) -> OutlierMeans | None:
    """The outliers of the runs that were measured; None if none was."""
    runs = [run.outliers for run in ours.values() if run.outliers is not None]
    if not runs:
        return None
    sinks = [run.attention_sink for run in runs if run.attention_sink is not None]
    return OutlierMeans(
        peak_activation=interval(estimate([run.peak_activation for run in runs], level)),
        sink_ratio=interval(estimate([run.sink_ratio for run in runs], level)),
        attention_sink=interval(estimate(sinks, level)) if sinks else None,
        uniform_attention=runs[0].uniform_attention,
    )


def task_means(ours: Runs, baseline: Runs | None, names: Sequence[str], level: float) -> dict[str, TaskMeans]:
    """By task, and under MEAN if there are several: the runs that have it; `baseline` is None for the baseline."""
    found = {}
    for name in [*([MEAN] if len(names) > 1 else []), *names]:
        values = accuracies(ours, name, names)
        if not values:
            continue
        theirs = {} if baseline is None else accuracies(baseline, name, names)
        difference = paired_difference(values, theirs, level)
        first = next(iter(ours.values())).accuracies
        asked = [name] if name != MEAN else names
        chances = [first.tasks[task].chance for task in asked if first is not None and task in first.tasks]
        guessed = [chance for chance in chances if chance is not None]
        found[name] = TaskMeans(
            accuracy=interval(estimate(list(values.values()), level)),
            difference=None if difference is None else interval(difference),
            chance=mean(guessed) if guessed and len(guessed) == len(asked) else None,
        )
    return found


def low_task_means(ours: Runs, recipes: Sequence[str], level: float) -> dict[str, LowTaskMeans]:
    """By recipe, over the runs that were scored in it on every task, and in high precision."""
    found = {}
    for recipe in recipes:
        scored = [run.accuracies for run in ours.values() if run.accuracies is not None]
        pairs = [
            (low, high)
            for each in scored
            if (low := each.mean_in(recipe)) is not None and (high := each.mean) is not None
        ]
        if pairs:
            found[recipe] = LowTaskMeans(
                accuracy=interval(estimate([low for low, _ in pairs], level)),
                change=interval(estimate([low - high for low, high in pairs], level)),
            )
    return found


def accuracies(runs: Runs, name: str, names: Sequence[str]) -> dict[int, float]:
    """By seed, the accuracy of a task, or for MEAN the mean over `names`; runs that lack one are left out."""
    wanted = names if name == MEAN else [name]
    return {
        seed: mean([run.accuracies.tasks[task].value for task in wanted])
        for seed, run in runs.items()
        if run.accuracies is not None and all(task in run.accuracies.tasks for task in wanted)
    }


def task_names(runs: Sequence[RunRecord]) -> list[str]:
    """Every task that a run was asked, in the order of the runs."""
    asked = [run.accuracies.wanted for run in runs if run.accuracies is not None]
    return list(dict.fromkeys(name for wanted in asked for name in wanted))


def lacking(runs: Sequence[RunRecord], tasks: bool, recipes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By option of `residua compare`, the folders of the runs without all its numbers."""
    names = set(task_names(runs))
    scored = {run.folder: run.accuracies for run in runs if run.accuracies is not None}
    low = {recipe for found in scored.values() for recipe in found.low}
    whole = {
        folder
        for folder, found in scored.items()
        if all(tasks.keys() >= names for tasks in (found.tasks, *(found.low.get(recipe, {}) for recipe in low)))
    }
    unscored = (r for r in runs if r.folder not in whole)
    unquantized = (r for r in runs if r.quantized is None or not r.quantized.losses.keys() >= set(recipes))
    found = {"tasks": unscored if tasks or names else (), "quantize": unquantized if recipes else ()}
    folders = {option: tuple(run.folder.name for run in without) for option, without in found.items()}
    return {option: without for option, without in folders.items() if without}


def over_runs(ours: Runs, value: Callable[[RunRecord], float], level: float) -> Interval | None:
    """The mean of a value over the runs that have it."""
    values = [found for run in ours.values() if (found := known(value(run))) is not None]
    return interval(estimate(values, level)) if values else None


def text_error(ours: Runs, baseline: Runs) -> float | None:
    """The standard error of the difference of losses from sampling text, its seeds taken as they are.

    Of document j with n_j tokens, d_j is the difference of the summed losses, averaged over seeds. With D = Σd / Σn the
    error is √(J/(J−1)·Σ(d_j − D·n_j)²) / Σn: documents are sampled, and the two models read the same ones. None if
    fewer than two documents are known.
    """
    pairs = [
        (a.document_losses, b.document_losses, a.document_tokens)
        for seed in sorted(ours.keys() & baseline.keys())
        if (a := ours[seed].final) and (b := baseline[seed].final) and a.document_tokens == b.document_tokens
    ]
    if not pairs or len(pairs[0][2]) < 2:
        return None
    tokens = pairs[0][2]
    sums = [mean([a[j] - b[j] for a, b, _ in pairs]) for j in range(len(tokens))]
    difference = math.fsum(sums) / sum(tokens)
    spread = math.fsum((d - difference * n) ** 2 for d, n in zip(sums, tokens, strict=True))
    return math.sqrt(len(tokens) / (len(tokens) - 1) * spread) / sum(tokens)


def interval(value: Estimate | Gain) -> Interval:
    """The same numbers, as results.json has them."""
    return Interval(
        value=value.value, count=value.count, error=value.error, low=value.low, high=value.high, freedom=value.freedom
    )
