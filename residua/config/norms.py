"""Choices of norm, which plugins can extend."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PlainValidator, SerializeAsAny

from residua.config.plugins import Family
from residua.config.settings import Positive


class NormChoice(Family):
    """A choice of norm. To add your own, subclass it with a `kind` (docs/extend.md)."""

    kept_widths: ClassVar[float] = 2.0
    """Widths that one norm stores for the backward pass, in addition to its input."""


class RMSNorm(NormChoice):
    """x / RMS(x) with a gain."""

    kept_widths: ClassVar[float] = 0.0

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square."""


class UnitRMSNorm(NormChoice):
    """x / RMS(x) without a gain."""

    kind: Literal["unit_rmsnorm"] = "unit_rmsnorm"
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square."""


class LayerNorm(NormChoice):
    """(x − mean(x)) / std(x) with a gain and a bias, only a gain, or neither."""

    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0)
    """Added to the variance."""
    parameters: Literal["gain_and_bias", "gain", "none"] = "gain_and_bias"
    """The trained vectors."""


class PreAffine(NormChoice):
    """RMSNorm of a learned per-channel scaling of x."""

    kept_widths: ClassVar[float] = 0.0

    kind: Literal["preaffine"] = "preaffine"
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square."""


class LowRankGate(NormChoice):
    """The keys shared by GatedNorm and GatedDyT: the gate on the normalised vector."""

    rank: Positive = 16
    """The rank of the gate."""
    granularity: Literal["elementwise", "tensorwise"] = "elementwise"
    """One gate per channel, or one per token."""
    activation: Literal["sigmoid", "tanh", "silu", "identity"] = "sigmoid"
    """The activation of the gate."""


class GatedNorm(LowRankGate):
    """RMSNorm with a low-rank gate on its own output."""

    kind: Literal["gatednorm"] = "gatednorm"
    eps: float = Field(1e-6, gt=0)
    """Added to the mean square."""


class DyT(NormChoice):
    """tanh(α x) with a gain and a bias; no statistics."""

    kept_widths: ClassVar[float] = 0.0
    training_only: ClassVar[tuple[str, ...]] = ("alpha",)

    kind: Literal["dyt"] = "dyt"
    alpha: float = Field(0.5, gt=0)
    """α at the start."""


class Derf(NormChoice):
    """erf(α x + s) with a gain and a bias; no statistics."""

    kept_widths: ClassVar[float] = 0.0
    training_only: ClassVar[tuple[str, ...]] = ("alpha",)

    kind: Literal["derf"] = "derf"
    alpha: float = Field(0.5, gt=0)
    """α at the start."""


class GatedDyT(LowRankGate):
    """DyT with a low-rank gate on its own output."""

    training_only: ClassVar[tuple[str, ...]] = ("alpha",)

    kind: Literal["gated_dyt"] = "gated_dyt"
    alpha: float = Field(0.5, gt=0)
    """α at the start."""


NormChoice.join(RMSNorm, UnitRMSNorm, LayerNorm, PreAffine, GatedNorm, DyT, Derf, GatedDyT)
Norm = Annotated[SerializeAsAny[NormChoice], PlainValidator(NormChoice.choose)]
