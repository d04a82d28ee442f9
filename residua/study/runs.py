"""Read run folders: how far a run got, its curves and its other measurements."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from residua.config.run import RunConfig
from residua.config.settings import Frozen
from residua.reading import Count, ReadError, Shape, check, inside, parse_json, read_json
from residua.storage.run import METRICS, read_metrics

T = TypeVar("T")

ENVIRONMENT = "environment.json"
INSPECTION = "inspection.json"
QUANTIZED = "quantized.json"
DIAGNOSIS = "report.html"


class QuantizedRun(Frozen):
    """quantized.json of a run: validation losses by recipe in nats per token, and outliers.

    `loss` is the same evaluation in high precision. `peak_activation` is the largest value any sublayer reads,
    `sink_ratio` the largest dimension's mean |h| over the median dimension's. A loss that is not finite is null.
    """

    calibration: int
    loss: float
    peak_activation: float
    sink_ratio: float
    losses: dict[str, float | None]


class _Row(Shape):
    step: Count
    loss: float | None = None


class _Sublayer(Shape):
    output_rms: float
    gradient_rms: float


class _DepthWeights(Shape):
    readers: list[Count]
    mean: list[list[float]]


class _Gate(Shape):
    layer: Count
    mean: float
    closed: float


class _Beta(Shape):
    sublayer: Count
    mean: list[float]


class _Experts(Shape):
    layer: Count
    load: list[float]


class _Inspection(Shape):
    """The sections of inspection.json that pages draw; a model has some of them."""

    sublayers: list[_Sublayer] | None = None
    depth_weights: _DepthWeights | None = None
    gates: list[_Gate] | None = None
    beta: list[_Beta] | None = None
    experts: list[_Experts] | None = None


@dataclass(frozen=True)
class RunRecord:
    """A run's measurements. Rows are those of its metrics.jsonl, in order of step.

    `speed` and `memory` are given where the rows of the training log are not all there.
    """

    folder: Path
    tokens_per_step: int
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    inspection: dict[str, Any] | None = None
    quantized: QuantizedRun | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    speed: float | None = None
    memory: float | None = None

    @property
    def loss_curve(self) -> list[tuple[float, float]]:
        """[(training tokens, validation loss), ...]."""
        return [(float(row["step"] * self.tokens_per_step), float(row["loss"])) for row in self.validation]

    @property
    def final_loss(self) -> float:
        """Validation loss at the last step, in nats per token."""
        return float(self.validation[-1]["loss"])

    @property
    def final_bits_per_byte(self) -> float:
        """Validation loss at the last step, in bits per byte."""
        return float(self.validation[-1]["bits_per_byte"])

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return int(self.validation[-1]["step"]) * self.tokens_per_step

    @property
    def hardware(self) -> str:
        """The GPU, or the processor and its threads; empty if unknown."""
        about = self.environment
        return str(about.get("gpu") or f"{about.get('processor', '')} {about.get('threads', '')}".strip())

    @property
    def tokens_per_second(self) -> float:
        """Median over the log lines after the first tenth, which holds warm-up and compilation; NaN if unknown."""
        if self.speed is not None:
            return self.speed
        rates = [float(row["tokens_per_second"]) for row in self.train if "tokens_per_second" in row]
        return median(rates[max(1, len(rates) // 10) :] or rates or [math.nan])

    @property
    def memory_gib(self) -> float:
        """The peak over the run; NaN if unknown."""
        if self.memory is not None:
            return self.memory
        return max((float(row["memory_gib"]) for row in self.train if "memory_gib" in row), default=math.nan)


def known(value: float) -> float | None:
    """The value; None if it is NaN, which stands for a measurement that was not made."""
    return None if math.isnan(value) else value


def read_run(folder: Path, config: RunConfig) -> RunRecord:
    """Everything measured in a run's folder; an empty record if the run has not started."""
    rows = read_metrics(folder / METRICS)
    inspection = _readable(folder / INSPECTION, _Inspection)
    return RunRecord(
        folder,
        config.tokens_per_step,
        [row for row in rows if row["kind"] == "train"],
        [row for row in rows if row["kind"] == "validation"],
        None if inspection is None else inspection.model_dump(exclude_none=True),
        read_quantized(folder),
        _readable(folder / ENVIRONMENT, dict[str, Any]) or {},
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
        file.seek(max(0, file.tell() - 8192))
        lines = file.read().decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        with suppress(ReadError):  # the first and the last line may be cut off
            row = check(parse_json(line, path, ""), _Row, path, "")
            return row.step, row.loss
    return 0, None


def is_complete(folder: Path, config: RunConfig) -> bool:
    """Whether the run reached its last step, validated there, and wrote its inspection, which it does last."""
    if not (folder / INSPECTION).exists():
        return False
    record = read_run(folder, config)
    return bool(record.train) and any(row["step"] >= config.train.steps for row in record.validation)


def read_quantized(folder: Path) -> QuantizedRun | None:
    """The low-precision measurements of a run; None if they are missing or unreadable."""
    return _readable(folder / QUANTIZED, QuantizedRun)


def _readable(path: Path, shape: type[T]) -> T | None:
    """The content of a file that a study can do without, or makes again; None if it is missing or damaged."""
    try:
        return read_json(inside(path.parent, path.name), shape, "")
    except ReadError:
        return None
