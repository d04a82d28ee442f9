"""The record of a run, read from its folder: its progress, curves and other measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, model_validator

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.errors import UserError
from residua.reading import Count, ReadError, Shape, check, inside, parse_json, read_json
from residua.report.figures import evenly
from residua.storage.run import METRICS, read_metrics
from residua.train.result import FINAL, FinalValidation
from residua.train.telemetry_curves import KIND as TELEMETRY
from residua.train.telemetry_curves import over_places, telemetry_of

T = TypeVar("T")
K = TypeVar("K")

ENVIRONMENT, INSPECTION, DIAGNOSIS = "environment.json", "inspection.json", "report.html"
QUANTIZED, OUTLIERS, ACCURACIES = "quantized.json", "outliers.json", "accuracies.json"
LAST_STEPS, LAST_SHARE = 200, 0.1
"""The training loss is averaged over this many last steps, but at most this share of a run."""
TAIL_BYTES = 1 << 16
"""The end of metrics.jsonl that is read to find the last step: a telemetry line can exceed ten thousand bytes."""
INSPECTION_DIGITS, PEAK_DIGITS, PEAK_POINTS = 3, 4, 60
"""Precision in a results file: more than a picture shows."""
EARLY, HALF = 0.1, 0.5
"""Shares of a run: papers discuss its first tenth, and every schedule lowers the rate in its second half."""


class QuantizedRun(Frozen):
    """quantized.json of a run: validation losses by recipe in nats per token, and outliers.

    `loss` is from the same evaluation in high precision. `peak_activation` is the largest value any sublayer reads,
    `sink_ratio` the largest dimension's mean |h| over the median dimension's. A loss that is not finite is null.
    """

    calibration: int
    loss: float
    peak_activation: float
    sink_ratio: float
    losses: dict[str, float | None]

    def filled(self, other: Self) -> Self:
        """Add the recipes that only `other` has, if both used the same calibration."""
        more = other.losses if other.calibration == self.calibration else {}
        return self.model_copy(update={"losses": {**more, **self.losses}})


class Outliers(Frozen):
    """outliers.json of a run: `peak_activation` and `sink_ratio` as in QuantizedRun, on the whole validation set.

    `attention_sink` is the mean attention to the first token over softmax layers, on `tokens` validation tokens, given
    with the value for uniform attention; null for a model without softmax attention.
    """

    peak_activation: float
    sink_ratio: float
    attention_sink: float | None = None
    uniform_attention: float | None = None
    tokens: int = 0


class TaskAccuracy(Frozen):
    """One task: the accuracy that papers report, and its standard error over the questions.

    `asked` identifies everything that affects the number: the questions and their worked examples.
    """

    value: float
    error: float | None = None
    metric: str = ""
    chance: float | None = None
    questions: int | None = None
    asked: str = ""


class Accuracies(Frozen):
    """accuracies.json of a run, by task, and in low precision by recipe and task; `wanted` was requested last."""

    wanted: tuple[str, ...]
    tasks: dict[str, TaskAccuracy] = Field(default_factory=dict)
    low: dict[str, dict[str, TaskAccuracy]] = Field(default_factory=dict)

    def mean_in(self, recipe: str = "") -> float | None:
        """The mean over the requested tasks, as trained or in low precision; None until all are scored."""
        tasks = self.low.get(recipe, {}) if recipe else self.tasks
        values = [tasks[name].value for name in self.wanted if name in tasks]
        return fmean(values) if values and len(values) == len(self.wanted) else None

    def filled(self, other: Self) -> Self:
        """Add the tasks and recipes that only `other` has."""
        recipes = dict.fromkeys((*other.low, *self.low))
        low = {recipe: {**other.low.get(recipe, {}), **self.low.get(recipe, {})} for recipe in recipes}
        wanted = tuple(dict.fromkeys((*other.wanted, *self.wanted)))
        return self.model_copy(update={"wanted": wanted, "tasks": {**other.tasks, **self.tasks}, "low": low})


class _Row(Shape):
    kind: str = ""
    step: Count
    loss: float | None = None


_Number = Annotated[float, Field(allow_inf_nan=True)]


class _Sublayer(Shape):
    sublayer: Count
    output_rms: _Number
    gradient_rms: _Number


class _Reads(Shape):
    readers: list[Count] = Field(min_length=1)
    mean: list[list[_Number]]


class _Gate(Shape):
    layer: Count
    mean: _Number
    closed: _Number


class _Beta(Shape):
    sublayer: Count
    mean: list[_Number]


class _Load(Shape):
    layer: Count
    load: list[_Number]


class Inspection(Shape):
    """inspection.json, as written by `train/result.py`; sections that a model lacks are None."""

    sublayers: list[_Sublayer] | None = None
    depth_weights: _Reads | None = None
    gates: list[_Gate] | None = None
    beta: list[_Beta] | None = None
    experts: list[_Load] | None = None

    @classmethod
    def rounded(cls, sections: Mapping[str, Any] | None) -> Self | None:
        """Round a run's sections; None if there are none, or if a number is not finite, which JSON cannot represent."""
        text = json.dumps(sections)
        finite = sections is not None and "NaN" not in text and "Infinity" not in text
        return cls(**_rounded(sections, INSPECTION_DIGITS)) if finite else None

    @property
    def sections(self) -> dict[str, Any]:
        """The sections that the model has."""
        return self.model_dump(exclude_none=True)

    def fits(self, config: RunConfig) -> bool:
        """Whether it has a row for every sublayer, as means over seeds require."""
        reads = self.depth_weights
        complete = not self.sublayers or len(self.sublayers) == config.model.sublayers
        return complete and (reads is None or len(reads.mean) == len(reads.readers))


def _rounded(value: Any, digits: int) -> Any:
    """Round every number in nested tables and lists."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rounded(inner, digits) for inner in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


_PEAK_COLUMNS = ("peak", "sink_ratio")


class Peaks(Frozen):
    """By step, the largest |h| that any sublayer reads and the largest residual-sink ratio; null if not finite."""

    step: tuple[int, ...]
    peak: tuple[float | None, ...]
    sink_ratio: tuple[float | None, ...]

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if not len(self.step) == len(self.peak) == len(self.sink_ratio) > 0:
            raise UserError("step, peak and sink_ratio must be non-empty lists of the same length.")
        return self

    @classmethod
    def of(cls, telemetry: Sequence[Mapping[str, Any]]) -> Self | None:
        """Build it from a run's telemetry, rounded; None without telemetry."""
        points = evenly(telemetry, PEAK_POINTS)
        if not points:
            return None
        columns = {
            name: tuple(_rounded(over_places(record, name), PEAK_DIGITS) for record in points) for name in _PEAK_COLUMNS
        }
        return cls(step=tuple(record["step"] for record in points), **columns)

    def telemetry(self, tokens_per_step: int) -> list[dict[str, Any]]:
        """The records in the form of metrics.jsonl, as if the model had one layer."""
        return [
            {"kind": TELEMETRY, "step": step, "tokens": step * tokens_per_step,
             "figures": {name: [getattr(self, name)[i]] for name in _PEAK_COLUMNS}}
            for i, step in enumerate(self.step)
        ]  # fmt: skip

    @property
    def last(self) -> float | None:
        """The peak at the last measurement."""
        return self.peak[-1]

    def at(self, share: float) -> float | None:
        """The peak at the first measurement after this share of the steps."""
        return next(peak for step, peak in zip(self.step, self.peak, strict=True) if step >= share * self.step[-1])

    @property
    def early(self) -> float | None:
        """The largest peak in the first tenth of the run."""
        known = [p for step, p in zip(self.step, self.peak, strict=True) if p and step <= EARLY * self.step[-1]]
        return max(known, default=None)


def change(before: float | None, after: float | None) -> float | None:
    """after / before; None if either is unknown or zero."""
    return after / before if before and after else None


@dataclass(frozen=True)
class RunRecord:
    """A run's measurements. The rows come from its metrics.jsonl, ordered by step.

    `tokens_per_second` is the median over the training log, `memory_gib` the peak, and `train_loss` the mean over the
    last 200 steps, but no more than a tenth of the run; NaN if unknown.
    """

    folder: Path
    tokens_per_step: int
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    inspection: dict[str, Any] | None = None
    quantized: QuantizedRun | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    tokens_per_second: float = math.nan
    memory_gib: float = math.nan
    train_loss: float = math.nan
    outliers: Outliers | None = None
    accuracies: Accuracies | None = None
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    final: FinalValidation | None = None

    @property
    def loss_curve(self) -> list[tuple[float, float]]:
        """[(training tokens, validation loss), ...]."""
        return [(float(row["step"] * self.tokens_per_step), float(row["loss"])) for row in self.validation]

    @property
    def final_loss(self) -> float:
        """Validation loss after the last step in nats per token, on the whole text if that was measured."""
        return float(self.validation[-1]["loss"]) if self.final is None else self.final.loss

    @property
    def final_bits_per_byte(self) -> float:
        return float(self.validation[-1]["bits_per_byte"]) if self.final is None else self.final.bits_per_byte

    @property
    def tokens(self) -> int:
        return int(self.validation[-1]["step"]) * self.tokens_per_step

    @property
    def hardware(self) -> str:
        """The GPU, or the processor and its threads; empty if unknown."""
        about = self.environment
        return str(about.get("gpu") or f"{about.get('processor', '')} {about.get('threads', '')}".strip())

    @property
    def stored(self) -> dict[str, Any]:
        """The measurements that results.json and a results file store under the same names."""
        return {
            "tokens_per_second": known(self.tokens_per_second),
            "memory_gib": known(self.memory_gib),
            "train_loss": known(self.train_loss),
            "peaks": Peaks.of(self.telemetry),
            **{key: getattr(self, key) for key in ("outliers", "accuracies", "quantized")},
        }

    def filled(self, other: RunRecord) -> RunRecord:
        """Add the measurements of the trained model that only `other`, the same run elsewhere, has."""
        keys = ("telemetry", "outliers", "accuracies", "quantized", "final")
        return replace(self, **{key: both(getattr(self, key), getattr(other, key)) for key in keys})


def both(first: Any, other: Any) -> Any:
    """Merge two values of one measurement of a run; `first` takes precedence."""
    if not first or not other:
        return first or other
    return first.filled(other) if isinstance(first, Accuracies | QuantizedRun) else first


def mean_of_last(rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean loss of the last steps of a training log; NaN if there is none.

    A log line holds the mean over the steps since the previous line. If a line starts before the window, only its steps
    inside count.
    """
    if not rows:
        return math.nan
    last = int(rows[-1]["step"])
    begin = last - max(1, min(LAST_STEPS, int(last * LAST_SHARE)))
    total = weight = 0.0
    before = 0
    for row in rows:
        inside_window = max(0, int(row["step"]) - max(before, begin))
        total, weight = total + inside_window * float(row["loss"]), weight + inside_window
        before = int(row["step"])
    return total / weight if weight else math.nan


def comparable(records: Mapping[K, RunRecord]) -> dict[K, RunRecord]:
    """The records with losses on the same text: all of it if every run has that loss, else the part all runs read."""
    read = {None if record.final is None else record.final.tokens for record in records.values()}
    if len(read) == 1:
        return dict(records)
    return {key: replace(record, final=None) for key, record in records.items()}


def known(value: float) -> float | None:
    """The value; None if it is NaN, which marks a missing measurement."""
    return None if math.isnan(value) else value


def read_run(folder: Path, config: RunConfig) -> RunRecord:
    """Everything measured in a run's folder; an empty record if the run has not started."""
    rows = read_metrics(folder / METRICS)
    train = [row for row in rows if row["kind"] == "train"]
    rates = [float(row["tokens_per_second"]) for row in train if "tokens_per_second" in row]
    return RunRecord(
        folder,
        config.tokens_per_step,
        train,
        [row for row in rows if row["kind"] == "validation"],
        _read_inspection(folder, config),
        read_measured(folder / QUANTIZED, QuantizedRun),
        read_environment(folder),
        # without the first tenth, which includes warm-up and compilation
        tokens_per_second=median(rates[max(1, len(rates) // 10) :] or rates or [math.nan]),
        memory_gib=max((float(row["memory_gib"]) for row in train if "memory_gib" in row), default=math.nan),
        train_loss=mean_of_last(train),
        outliers=read_measured(folder / OUTLIERS, Outliers),
        accuracies=read_measured(folder / ACCURACIES, Accuracies),
        telemetry=telemetry_of(rows),
        final=read_measured(folder / FINAL, FinalValidation),
    )


def steps_done(folder: Path) -> int:
    """The last step that was logged."""
    return latest(folder)[0]


def latest(folder: Path) -> tuple[int, float | None]:
    """The last logged step and its loss; (0, None) before the first. Reads only the end of the file."""
    path = folder / METRICS
    if not path.exists():
        return 0, None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    measured = 0
    for line in reversed(lines):
        with suppress(ReadError):  # the first and last lines may be truncated
            row = check(parse_json(line, path, ""), _Row, path, "")
            if row.kind != TELEMETRY:
                return max(row.step, measured), row.loss
            measured = max(row.step, measured)
    return measured, None


def read_environment(folder: Path) -> dict[str, Any]:
    """The environment of a run; empty if it is missing or unreadable."""
    return read_measured(folder / ENVIRONMENT, dict[str, Any]) or {}


def is_complete(folder: Path, config: RunConfig) -> bool:
    """Whether the run reached its last step, validated there, and finally wrote its inspection."""
    if _read_inspection(folder, config) is None:
        return False
    record = read_run(folder, config)
    return bool(record.train) and any(row["step"] >= config.train.steps for row in record.validation)


def _read_inspection(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    """The inspection of a run; None if it is missing or damaged, so that the run writes it again."""
    inspection = read_measured(folder / INSPECTION, Inspection)
    return inspection.sections if inspection is not None and inspection.fits(config) else None


def read_current(folder: Path, name: str, shape: type[T]) -> T | None:
    """A current measurement of a run; None if it is missing, damaged, or older than the run's last training."""
    path, inspection = folder / name, folder / INSPECTION
    if not path.exists() or not inspection.exists() or path.stat().st_mtime < inspection.stat().st_mtime:
        return None
    return read_measured(path, shape)


def read_measured(path: Path, shape: type[T]) -> T | None:
    """The content of a file that a study can regenerate or do without; None if it is missing or damaged."""
    try:
        return read_json(inside(path.parent, path.name), shape, "")
    except ReadError:
        return None
