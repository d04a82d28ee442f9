"""Read run folders: how far a run got, its curves and its other measurements."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from pydantic import Field

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


class _Inspection(Shape):
    """inspection.json, as `train/inspect.py` writes it; sections that a model does not have are left out."""

    sublayers: list[_Sublayer] = Field(default_factory=list)
    depth_weights: _Reads | None = None
    gates: list[_Gate] = Field(default_factory=list)
    beta: list[_Beta] = Field(default_factory=list)
    experts: list[_Load] = Field(default_factory=list)

    def fits(self, config: RunConfig) -> bool:
        """Whether it has a row for every sublayer, so that the means over seeds can be taken."""
        reads = self.depth_weights
        complete = not self.sublayers or len(self.sublayers) == config.model.sublayers
        return complete and (reads is None or len(reads.mean) == len(reads.readers))


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
    return RunRecord(
        folder,
        config.tokens_per_step,
        [row for row in rows if row["kind"] == "train"],
        [row for row in rows if row["kind"] == "validation"],
        _read_inspection(folder, config),
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
    if _read_inspection(folder, config) is None:
        return False
    record = read_run(folder, config)
    return bool(record.train) and any(row["step"] >= config.train.steps for row in record.validation)


def _read_inspection(folder: Path, config: RunConfig) -> dict[str, Any] | None:
    """What a run looks like inside; None if it is missing or damaged, and the run writes it again."""
    found = _readable(folder / INSPECTION, _Inspection)
    return found.model_dump(exclude_unset=True) if found is not None and found.fits(config) else None


def read_quantized(folder: Path) -> QuantizedRun | None:
    """The low-precision measurements of a run; None if they are missing or unreadable."""
    return _readable(folder / QUANTIZED, QuantizedRun)


def _readable(path: Path, shape: type[T]) -> T | None:
    """The content of a file that a study can do without, or makes again; None if it is missing or damaged."""
    try:
        return read_json(inside(path.parent, path.name), shape, "")
    except ReadError:
        return None
