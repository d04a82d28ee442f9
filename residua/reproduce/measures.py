"""Measures of a run: columns of a paper's table by name, read from the run's files."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from residua.study.plan import RUNS
from residua.study.records import HALF, Peaks, change
from residua.study.results import RunResult
from residua.study.statistics import mean


@dataclass(frozen=True)
class Measure:
    """A column: its title, and how to read it from a complete run in a study's folder (None if not there yet).

    Values of a `ratio` measure are compared by their ratio, shown in the format `times`, others by their difference.
    `diagnosed` measures need a diagnosis, `quantized` ones low-precision measurements, `tasked` ones task scores.
    If `more_is_better`, a claim that one row is below another is shown as the gain of the other.
    `instead` names the substitute if a study lacks this measure for some rows.
    """

    title: str
    of: Callable[[RunResult, Path], float | None]
    meaning: str = ""
    digits: str = ".4f"
    ratio: bool = False
    times: str = ".2f"
    diagnosed: bool = False
    quantized: bool = False
    tasked: bool = False
    more_is_better: bool = False
    instead: str = ""

    def shown(self, value: float) -> str:
        """Format a value for the tables."""
        return format(value, self.digits)


def _perplexity(run: RunResult, out: Path) -> float | None:
    return None if run.loss is None else math.exp(run.loss)


def _outlier(name: str) -> Callable[[RunResult, Path], float | None]:
    return lambda run, out: getattr(run.outliers or run.quantized, name, None)


def _peak(read: Callable[[Peaks], float | None]) -> Callable[[RunResult, Path], float | None]:
    return lambda run, out: None if run.peaks is None else read(run.peaks)


def _accuracy(recipe: str = "") -> Callable[[RunResult, Path], float | None]:
    """The mean of the reported metric over the tasks, in %; None until the run is scored on all of them."""

    def of(run: RunResult, out: Path) -> float | None:
        share = None if run.accuracies is None else run.accuracies.mean_in(recipe)
        return None if share is None else 100 * share

    return of


def _cost(recipe: str) -> Callable[[RunResult, Path], float | None]:
    def added(run: RunResult, out: Path) -> float | None:
        loss = None if run.quantized is None else run.quantized.losses.get(recipe)
        return None if run.quantized is None or loss is None else loss - run.quantized.loss

    return added


def _inside(read: Callable[..., float | None]) -> Callable[[RunResult, Path], float | None]:
    """A value from the diagnosis in the run's folder."""

    def of(run: RunResult, out: Path) -> float | None:
        from residua.diagnose import Diagnosis
        from residua.diagnose.api import JSON

        path = out / RUNS / run.folder / JSON
        return read(Diagnosis.read(path).models[0]) if path.exists() else None

    return of


MEASURES: dict[str, Measure] = {
    "loss": Measure("validation loss", lambda run, out: run.loss, "nats per token after the last step"),
    "perplexity": Measure(
        "perplexity", _perplexity, "exp of the validation loss", digits=".3f", ratio=True, times=".4f"
    ),
    "train_loss": Measure(
        "training loss", lambda run, out: run.train_loss,
        "mean over the last 200 steps, or the last tenth of a short run",
    ),
    "accuracy": Measure(
        "accuracy", _accuracy(), "mean over tasks of the metric that papers report, in %", digits=".2f",
        tasked=True, more_is_better=True,
    ),
    "nvfp4_accuracy": Measure(
        "accuracy in W4A4", _accuracy("nvfp4"), "the same after NVFP4", digits=".2f", quantized=True, tasked=True,
        more_is_better=True,
    ),
    "nvfp4_smooth_accuracy": Measure(
        "accuracy in W4A4+SQ", _accuracy("nvfp4+smooth"), "the same after SmoothQuant and NVFP4", digits=".2f",
        quantized=True, tasked=True, more_is_better=True,
    ),
    "peak_activation": Measure(
        "peak activation", _outlier("peak_activation"), "the largest value that any sublayer reads", digits=".4g",
        ratio=True, instead="last_peak",
    ),
    "last_peak": Measure(
        "peak activation by telemetry", _peak(lambda peaks: peaks.last),
        "the largest value that any sublayer reads after the last step, on the few tokens used by telemetry",
        digits=".4g", ratio=True,
    ),
    "early_peak": Measure(
        "peak activation of the first tenth", _peak(lambda peaks: peaks.early),
        "the largest that telemetry measured in the first tenth of the run", digits=".4g", ratio=True,
    ),
    "peak_change": Measure(
        "peak activation after the last step / the largest of the first tenth",
        _peak(lambda peaks: change(peaks.early, peaks.last)), "by telemetry", ratio=True,
    ),
    "late_peak_change": Measure(
        "peak activation after the last step / at half of the run",
        _peak(lambda peaks: change(peaks.at(HALF), peaks.last)), "by telemetry", ratio=True,
    ),
    "sink_ratio": Measure(
        "residual-sink ratio", _outlier("sink_ratio"),
        "mean |h| over tokens and depth, largest dimension / median dimension", digits=".4g", ratio=True,
    ),
    "nvfp4_cost": Measure(
        "cost of W4A4", _cost("nvfp4"), "loss after NVFP4 minus the loss before", quantized=True
    ),
    "nvfp4_smooth_cost": Measure(
        "cost of W4A4+SQ", _cost("nvfp4+smooth"), "the same after SmoothQuant", quantized=True
    ),
    "attention_sink": Measure(
        "attention sink", _outlier("attention_sink"), "mean attention to the first token, over softmax layers",
        ratio=True,
    ),
    "token_similarity": Measure(
        "token similarity",
        _inside(lambda m: mean([state.token_similarity for state in m.states])),
        "mean cosine of two tokens of a sequence, over states",
        diagnosed=True,
    ),
    "core_features": Measure(
        "core features",
        _inside(lambda m: mean(counts) if (counts := [s.core_features for s in m.states if s.core_features]) else None),
        "principal components that hold 99 % of the variance, mean over states",
        digits=".1f",
        diagnosed=True,
    ),
}  # fmt: skip
