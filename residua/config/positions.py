"""Ways to extend rotary positions beyond the original training length, distinguished by `kind`.

The names and formulas are those of transformers' `rope_type`; `model/rope.py` computes them. A table has every number
that determines the angles, so that none depends on other keys.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from residua.config.settings import Frozen, Positive
from residua.errors import UserError

Factor = Annotated[float, Field(gt=0)]


class LinearRope(Frozen):
    """Every frequency divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: Factor


class DynamicRope(Frozen):
    """A base that grows with the sequence once it is longer than `original_context` (dynamic NTK)."""

    kind: Literal["dynamic_ntk"] = "dynamic_ntk"
    factor: Factor
    """Factor by which sequences can be longer."""
    original_context: Positive


class YarnRope(Frozen):
    """YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones are kept, with a ramp in between.

    cos and sin are multiplied by `attention_factor`.
    """

    kind: Literal["yarn"] = "yarn"
    factor: Factor
    original_context: Positive
    """The original training length."""
    attention_factor: Factor = 1.0
    beta_fast: Factor = 32.0
    """Rotations within `original_context` above which a frequency is kept."""
    beta_slow: Factor = 1.0
    """Rotations within `original_context` below which a frequency is divided."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole pairs."""


class Llama3Rope(Frozen):
    """Llama 3.1: wavelengths above `original_context` / `low` divided by `factor`, those below / `high` kept."""

    kind: Literal["llama3"] = "llama3"
    factor: Factor
    original_context: Positive
    low: Factor = 1.0
    high: Factor = 4.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high <= self.low:
            raise UserError(
                f"rope_scaling.high = {self.high} must be more than rope_scaling.low = {self.low}: "
                "Llama 3.1 has 4 and 1."
            )
        return self


class LongRope(Frozen):
    """LongRoPE (arXiv 2402.13753): each frequency has two divisors, for sequences up to `original_context` and longer.

    cos and sin are multiplied by `attention_factor`.
    """

    kind: Literal["longrope"] = "longrope"
    short: tuple[Factor, ...]
    """Divisors up to `original_context`, one per pair of elements of a head."""
    long: tuple[Factor, ...]
    """Divisors beyond `original_context`."""
    original_context: Positive
    attention_factor: Factor = 1.0

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len(self.short) != len(self.long):
            raise UserError(
                f"rope_scaling.short has {len(self.short)} factors and rope_scaling.long {len(self.long)}: "
                "give both one factor per pair of elements of a head."
            )
        return self


class ProportionalRope(Frozen):
    """Only the first `share` of a head's pairs rotate; their frequencies are divided by `factor`."""

    kind: Literal["proportional"] = "proportional"
    share: float = Field(gt=0, le=1)
    factor: Factor = 1.0


class PartialRope(Frozen):
    """Only the first `share` of a head's pairs rotate, with the frequencies of a head of that width (GPT-NeoX)."""

    kind: Literal["partial"] = "partial"
    share: float = Field(gt=0, le=1)


RopeScaling = Annotated[
    LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope | ProportionalRope | PartialRope,
    Field(discriminator="kind"),
]


class QueryGrowth(Frozen):
    """The query at position p of its document is multiplied by 1 + `beta` · ln(1 + ⌊p / original_context⌋) (Ministral
    3).
    """

    beta: float
    original_context: Positive
    """The original training length, below which queries do not grow."""
