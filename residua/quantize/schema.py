"""The results of a quantization as data: the versioned content of results.json (docs/quantize.md)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from residua.config.settings import Frozen

ERROR_TOKENS = 8192
"""The first evaluated tokens, over which the errors of modules are measured."""


class Outlier(Frozen):
    """An input channel of a projection that stands out."""

    channel: int
    peak: float = Field(description="largest |x| over the tokens looked at")
    ratio: float = Field(description="peak over the median channel's")
    share: float = Field(description="its share of the squared error from rounding the activations")


class ModuleError(Frozen):
    """One module rounded alone: the relative error of its output, in total and from weights or activations only."""

    name: str
    shape: tuple[int, int]
    error: float
    weight_error: float
    activation_error: float
    input_peak: float = Field(description="largest |x| that the module reads")
    inner_peak: float | None = Field(description="largest input of the experts' last matrices; null for other modules")
    outliers: tuple[Outlier, ...]


class Probe(Frozen):
    """The loss with one more module left in high precision, and the gain."""

    module: str
    loss: float
    gain: float


class KeptTensor(Frozen):
    """A tensor that stays in high precision."""

    name: str
    shape: tuple[int, ...]
    parameters: int
    reason: str


class QuantizationResult(Frozen):
    """results.json. Losses are nats per token on the fixed validation set."""

    version: Literal[1] = 1
    model: str
    scheme: str
    bits: str
    words: str
    alpha: float | None = Field(description="SmoothQuant's exponent; null without it")
    inside: bool = Field(description="whether SmoothQuant also smoothed inside sublayers, not only after norms")
    calibration_sequences: int
    exempt: tuple[str, ...]
    text: str
    validation_tokens: int
    device: str
    loss_before: float
    loss_folded: float | None = Field(
        description="after folding alone, which changes nothing but rounding; null without SmoothQuant"
    )
    loss_after: float
    loss_without_exemptions: float | None = Field(description="null when nothing was exempted")
    modules: tuple[ModuleError, ...] = Field(description="in the order of the forward pass")
    probes: tuple[Probe, ...]
    kept: tuple[KeptTensor, ...]
    unsmoothed: tuple[str, ...] = Field(description="quantized modules whose input could not be smoothed")
    bytes_before: int
    bytes_after: int

    @property
    def cost(self) -> float:
        """Nats per token that low precision adds."""
        return self.loss_after - self.loss_before

    @property
    def worst(self) -> list[ModuleError]:
        """The modules by error, largest first."""
        return sorted(self.modules, key=lambda module: -module.error)

    @property
    def perplexity_before(self) -> float:
        """Perplexity in high precision."""
        return perplexity(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        """Perplexity of the quantized model."""
        return perplexity(self.loss_after)


def perplexity(loss: float) -> float:
    """e^loss, or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
