"""How outliers grew while a run trained: its telemetry put together over layers, small enough for a results file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import model_validator

from residua.config.settings import Frozen
from residua.errors import UserError
from residua.report.figures import evenly
from residua.train.telemetry_curves import KIND, over_places

POINTS, DIGITS = 60, 4
EARLY, HALF = 0.1, 0.5
"""Shares of a run: papers speak of its first tenth, and every schedule lowers the rate in its second half."""


class Peaks(Frozen):
    """By step, the largest |h| that any sublayer reads and the largest residual-sink ratio; null if not finite."""

    step: tuple[int, ...]
    peak: tuple[float | None, ...]
    sink_ratio: tuple[float | None, ...]

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if not len(self.step) == len(self.peak) == len(self.sink_ratio) > 0:
            raise UserError("step, peak and sink_ratio are lists of one length, and not empty.")
        return self

    @classmethod
    def of(cls, telemetry: Sequence[Mapping[str, Any]]) -> Self | None:
        """From the telemetry of a run, rounded; None if there is none."""
        kept = evenly(telemetry, POINTS)
        if not kept:
            return None
        columns = {name: tuple(_rounded(over_places(record, name)) for record in kept) for name in _FIGURES}
        return cls(step=tuple(record["step"] for record in kept), **columns)

    def telemetry(self, tokens_per_step: int) -> list[dict[str, Any]]:
        """Records as in metrics.jsonl, as if the model had one layer."""
        return [
            {"kind": KIND, "step": step, "tokens": step * tokens_per_step,
             "figures": {name: [getattr(self, name)[i]] for name in _FIGURES}}
            for i, step in enumerate(self.step)
        ]  # fmt: skip

    @property
    def last(self) -> float | None:
        """The peak at the last measurement."""
        return self.peak[-1]

    def at(self, share: float) -> float | None:
        """The peak when this share of the steps was done: at the first measurement from there on."""
        return next(peak for step, peak in zip(self.step, self.peak, strict=True) if step >= share * self.step[-1])

    @property
    def early(self) -> float | None:
        """The largest peak in the first tenth of the run."""
        known = [p for step, p in zip(self.step, self.peak, strict=True) if p and step <= EARLY * self.step[-1]]
        return max(known, default=None)


_FIGURES = ("peak", "sink_ratio")


def change(before: float | None, after: float | None) -> float | None:
    """after / before; None if either is unknown or zero."""
    return after / before if before and after else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
