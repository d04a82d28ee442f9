"""The content of diagnosis.json (docs/reference/diagnosis.md); `Diagnosis.model_json_schema()` is its JSON schema.

Each metric defines its own keys; `ModelDiagnosis` inherits them from the classes in `metrics/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, SerializeAsAny, create_model

from residua.config.settings import Frozen
from residua.diagnose import metric
from residua.diagnose.metric import Metric, NoKeys
from residua.diagnose.metrics import METRICS
from residua.diagnose.metrics.removal import AblationFacts
from residua.diagnose.text import TextFacts
from residua.reading import read_json

VERSION: Literal[1] = 1
Metrics = Sequence[type[Metric]]


class Header(Frozen):
    """The model and the text that it read."""

    name: str
    path: str
    description: str
    parameters: int
    layers: int
    width: int
    state_name: str
    text: TextFacts
    device: str
    precision: str = Field("", description="of most weights; empty in older files")
    seconds: float
    loss: float
    ablation_tokens: int
    place: int | None = Field(None, description="place of its variant in the study, which decides its colour")


def _keys(metrics: Metrics) -> list[type[Frozen]]:
    """The metrics' key classes as base classes; pydantic puts the fields of the last base first."""
    return [metric.keys for metric in reversed(metrics) if metric.keys is not NoKeys]


def _kinds(metrics: Metrics) -> Any:
    """The type of a finding's `kind`."""
    return Literal[tuple(kind for metric in sorted(metrics, key=lambda m: m.page_place) for kind in metric.kinds)]


class Finding(metric.Finding):  # noqa: D101 (its docstring is the metric's)
    __doc__ = metric.Finding.__doc__

    kind: _kinds(METRICS)  # type: ignore[valid-type]


class ModelDiagnosis(*_keys(METRICS), Header):  # type: ignore[misc]
    """Everything about one model. Sections that do not apply are empty; `skipped` explains those one might expect."""

    metrics: ClassVar[tuple[type[Metric], ...]] = METRICS

    ablations: list[AblationFacts] = Field(default_factory=list)
    findings: list[Finding] = Field(default_factory=list)
    summary: list[str] = Field(default_factory=list)
    skipped: list[str] = Field(default_factory=list)


@cache
def with_metrics(extra: tuple[type[Metric], ...]) -> type[ModelDiagnosis]:
    """`ModelDiagnosis` with the keys and kinds of findings of more metrics."""
    if not extra:
        return ModelDiagnosis
    every = (*METRICS, *extra)
    finding = create_model("Finding", __base__=metric.Finding, kind=_kinds(every))

    class Extended(*_keys(extra), ModelDiagnosis, title="ModelDiagnosis"):  # type: ignore[misc]
        metrics = every
        findings: list[finding] = Field(default_factory=list)  # type: ignore[assignment]

    return Extended


class Diagnosis(Frozen):
    """The file: one or several models, diagnosed in the same way."""

    version: Literal[1] = VERSION
    models: list[SerializeAsAny[ModelDiagnosis]] = Field(min_length=1)

    @classmethod
    def read(cls, path: str | Path, extra: Metrics = ()) -> Self:
        """Read a diagnosis.json; `extra` lists the metrics it was made with in addition to this package's."""
        model: Any = with_metrics(tuple(extra))
        models: Any = (list[model], Field(min_length=1))
        file = create_model("Diagnosis", __base__=cls, models=models) if extra else cls
        return read_json(Path(path), file, f"it is not a diagnosis of version {VERSION}, so diagnose the model again")


__all__ = ["Diagnosis", "Finding", "ModelDiagnosis", "TextFacts", "with_metrics"]
