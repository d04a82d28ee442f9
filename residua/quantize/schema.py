"""What a quantization came to, as data: the documented, versioned content of results.json (docs/quantize.md)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from residua.config.settings import Frozen


class Outlier(Frozen):
    """An input channel of a projection that stands out."""

    channel: int
    peak: float = Field(description="largest |x| over the tokens looked at")
    ratio: float = Field(description="peak over the median channel's")
    share: float = Field(description="its share of the squared error that rounding the activations brings in")


class ModuleError(Frozen):
    """One module, rounded on its own: relative error of its output, of both kinds together and apart."""

    name: str
    shape: tuple[int, int]
    error: float
    weight_error: float
    activation_error: float
    input_peak: float = Field(description="largest |x| that the module reads")
    inner_peak: float | None = Field(description="largest value that experts' last matrices read; null elsewhere")
    outliers: tuple[Outlier, ...]


class Probe(Frozen):
    """The loss with one more projection left in high precision, and what that gains."""

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
    inside: bool = Field(description="whether SmoothQuant reached into sublayers, or out of norms only")
    calibration_sequences: int
    exempt: tuple[str, ...]
    text: str
    validation_tokens: int
    device: str
    loss_before: float
    loss_folded: float | None = Field(description="after folding alone, which must change nothing but rounding")
    loss_after: float
    loss_without_exemptions: float | None = Field(description="null when nothing was exempted")
    modules: tuple[ModuleError, ...] = Field(description="in the order of the forward pass")
    probes: tuple[Probe, ...]
    kept: tuple[KeptTensor, ...]
    unsmoothed: tuple[str, ...] = Field(description="quantized projections whose input no factor could be moved out of")
    bytes_before: int
    bytes_after: int

    @property
    def worst(self) -> list[ModuleError]:
        """The modules by error, largest first."""
        return sorted(self.modules, key=lambda module: -module.error)

    @property
    def perplexity_before(self) -> float:
        return perplexity(self.loss_before)

    @property
    def perplexity_after(self) -> float:
        return perplexity(self.loss_after)


def perplexity(loss: float) -> float:
    """e^loss; infinite where that has no number."""
    return math.exp(loss) if loss < 700 else math.inf
