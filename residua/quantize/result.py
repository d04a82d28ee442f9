"""The result of a quantization: the content of results.json (docs/reference/quantization.md), and its sentences."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from residua.config.settings import Frozen

ERROR_TOKENS = 8192
"""Module errors are measured over this many of the first evaluated tokens."""


class Outlier(Frozen):
    """An input channel of a projection that stands out."""

    channel: int
    peak: float = Field(description="largest |x| over the measured tokens")
    ratio: float = Field(description="peak over the median channel's")
    share: float = Field(description="its share of the squared error from rounding the activations")


class ModuleError(Frozen):
    """One module rounded alone: the relative error of its output, in total and from only weights or activations."""

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


class UnquantizedTensor(Frozen):
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
        description="after folding alone, which changes only rounding; null without SmoothQuant"
    )
    loss_after: float
    loss_without_exemptions: float | None = Field(description="null when nothing was exempted")
    modules: tuple[ModuleError, ...] = Field(description="in the order of the forward pass")
    probes: tuple[Probe, ...]
    kept: tuple[UnquantizedTensor, ...]
    unsmoothed: tuple[str, ...] = Field(description="quantized modules whose inputs could not be smoothed")
    bytes_before: int
    bytes_after: int

    @property
    def cost(self) -> float:
        """The nats per token that low precision adds."""
        return self.loss_after - self.loss_before

    @property
    def worst(self) -> list[ModuleError]:
        """The modules by decreasing error."""
        return sorted(self.modules, key=lambda module: -module.error)


def perplexity(loss: float) -> float:
    """e^loss, or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


WORTH_MENTIONING = 1e-3
"""Nats; a smaller gain is noise and does not merit a recommendation."""
HEALTHY, DEAR = 0.03, 0.1
"""Nats that low precision adds: up to the first it is healthy, above the second it is expensive."""
CLEAR = 1.25
"""One rounding causes most of an error if its part is at least this many times the other."""
STANDS_OUT = 2.0
"""A module stands out if its error is this many times the median module's."""
_SUBLAYER = re.compile(r"sublayers\.(\d+)\.(?:body\.)?(.+)")


def verdict(result: QuantizationResult) -> str:
    """One sentence: the cost of quantization."""
    before, after = result.loss_before, result.loss_after
    return (
        f"{result.scheme} ({result.bits}{smoothing(result)}): loss {before:.4f} → {after:.4f} "
        f"({result.cost:+.4f} nats), perplexity {perplexity(before):.3f} → {perplexity(after):.3f}, "
        f"{size(result.bytes_before)} → {size(result.bytes_after)}."
    )


def smoothing(result: QuantizationResult) -> str:
    """SmoothQuant's exponent for a sentence; empty without SmoothQuant."""
    return "" if result.alpha is None else f", SmoothQuant α = {result.alpha:g}"


def sentences(result: QuantizationResult) -> list[str]:
    """The findings as sentences, most important first."""
    lines = [verdict(result)]
    if result.modules:
        lines.append(worst(result))
    lines += [advice for advice in (exempting(result),) if advice]
    if result.loss_without_exemptions is not None:
        gain = result.loss_without_exemptions - result.loss_after
        lines.append(
            f"Exempting {', '.join(result.exempt)} lowered the loss by {gain:.4f} nats: without the exemption it is "
            f"{result.loss_without_exemptions:.4f}, perplexity {perplexity(result.loss_without_exemptions):.3f}."
        )
    if result.loss_folded is not None:
        lines.append(f"Folding alone changed the loss by {result.loss_folded - result.loss_before:+.1e} nats.")
    depth = [tensor for tensor in result.kept if tensor.reason == "depth operator"]
    if depth:
        count = sum(tensor.parameters for tensor in depth)
        lines.append(f"The depth operators' {count:,} parameters stay in high precision.")
    return lines


def worst(result: QuantizationResult) -> str:
    """Name the worst module and the cause of its error."""
    module = result.worst[0]
    return f"Worst module: {module.name} ({place(module.name)}), {module.error:.1%} error; {blame(module)}"


def exempting(result: QuantizationResult) -> str:
    """Name the module whose exemption gains most; empty if no gain is large enough to mention."""
    best = max(result.probes, key=lambda probe: probe.gain, default=None)
    if best is None or best.gain <= WORTH_MENTIONING:
        return ""
    return f"Leaving {best.module} in high precision gains {best.gain:.4f} nats: --exempt '{best.module}'."


def blame(module: ModuleError) -> str:
    """Say which rounding causes the error, and name the largest input channels."""
    return f"{source(module.activation_error, module.weight_error)}; largest input channels {channels(module)}."


def source(activations: float, weights: float) -> str:
    """Say which of the two errors is clearly larger, if one is."""
    high, low = max(activations, weights), min(activations, weights)
    if high <= CLEAR * low:
        return f"from its activations ({activations:.2%} alone) and its weights ({weights:.2%} alone) about equally"
    part, other = ("activations", "weights") if activations > weights else ("weights", "activations")
    return f"mostly from its {part} ({high:.2%} alone, {other} {low:.2%})"


def total(result: QuantizationResult) -> str:
    """Say which rounding causes the error over all modules, by their medians."""
    activations = statistics.median(module.activation_error for module in result.modules)
    weights = statistics.median(module.weight_error for module in result.modules)
    return f"The median module's error comes {source(activations, weights)}."


def standing_out(result: QuantizationResult) -> list[ModuleError]:
    """Modules with an error far above the median module's, worst first."""
    middle = statistics.median(module.error for module in result.modules) if result.modules else 0.0
    return [module for module in result.worst if module.error >= STANDS_OUT * middle > 0]


def helps(result: QuantizationResult) -> list[str]:
    """List the measures that were found to help, then those worth trying."""
    lines = []
    if result.probes:
        least = f"none of the {len(result.probes)} worst modules gains {WORTH_MENTIONING:g} nats or more when exempt"
        lines.append(exempting(result) or f"{least[0].upper()}{least[1:]}.")
    if result.cost <= HEALTHY:
        return lines
    odd = standing_out(result)
    if result.alpha is None and any(module.activation_error >= CLEAR * module.weight_error for module in odd):
        lines.append("Not tried: SmoothQuant (--smooth 0.5), which helps with outlier channels in activations.")
    elif result.alpha is not None and not result.inside and any(m.name in result.unsmoothed for m in odd):
        lines.append("Not tried: --inside, which also smooths the input of each sublayer's last matrix.")
    if result.bits == "W4A4":
        lines.append("Not tried: FP8 (--scheme fp8), which is more precise and needs about twice the memory.")
    return lines


def place(name: str) -> str:
    """The location of a module for display: `layer 2 feed-forward up`."""
    parts = split(name)
    return name if parts is None else f"layer {parts[0]} {parts[1]}"


def split(name: str) -> tuple[int, str] | None:
    """A module's layer, and its part there (`attention project`); None for a module outside the layers."""
    match = _SUBLAYER.fullmatch(name)
    if match is None:
        return None
    sublayer = int(match[1])
    return sublayer // 2, f"{'feed-forward' if sublayer % 2 else 'attention'} {match[2]}"


def channels(module: ModuleError) -> str:
    """The outlier channels with their ratios."""
    return ", ".join(f"{o.channel} ({o.ratio:.3g}× the median)" for o in module.outliers)


def size(count: int) -> str:
    """Bytes as 12.3 MiB."""
    return f"{count / 2**20:.2f} MiB"


def shapes(shape: Sequence[int]) -> str:
    """A shape as 3 × 4."""
    return " × ".join(str(extent) for extent in shape) or "scalar"
