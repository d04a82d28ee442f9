"""The sentences and table cells of a quantization, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from residua.quantize.schema import ModuleError, QuantizationResult, perplexity

WORTH_MENTIONING = 1e-3
"""Nats; a smaller gain is noise and not worth a recommendation."""


def verdict(result: QuantizationResult) -> str:
    """One sentence: what quantization costs."""
    change = result.loss_after - result.loss_before
    return (
        f"{result.scheme} ({result.bits}{smoothing(result)}): loss {result.loss_before:.4f} → {result.loss_after:.4f} "
        f"({change:+.4f} nats), perplexity {result.perplexity_before:.3f} → {result.perplexity_after:.3f}, "
        f"{size(result.bytes_before)} → {size(result.bytes_after)}."
    )


def smoothing(result: QuantizationResult) -> str:
    """SmoothQuant's exponent for a sentence; empty without SmoothQuant."""
    return "" if result.alpha is None else f", SmoothQuant α = {result.alpha:g}"


def sentences(result: QuantizationResult) -> list[str]:
    """The findings in sentences, most important first."""
    found = [verdict(result)]
    if result.modules:
        worst = result.worst[0]
        found.append(f"Worst module: {worst.name}, {worst.error:.1%} error; {blame(worst)}")
    best = max(result.probes, key=lambda probe: probe.gain, default=None)
    if best is not None and best.gain > WORTH_MENTIONING:
        found.append(f"Leaving {best.module} in high precision gains {best.gain:.4f} nats: --exempt '{best.module}'.")
    if result.loss_without_exemptions is not None:
        gain = result.loss_without_exemptions - result.loss_after
        found.append(
            f"Exempting {', '.join(result.exempt)} lowered the loss by {gain:.4f} nats: without that it is "
            f"{result.loss_without_exemptions:.4f}, perplexity {perplexity(result.loss_without_exemptions):.3f}."
        )
    if result.loss_folded is not None:
        found.append(f"Folding alone changed the loss by {result.loss_folded - result.loss_before:+.1e} nats.")
    depth = [tensor for tensor in result.kept if tensor.reason == "depth operator"]
    if depth:
        count = sum(tensor.parameters for tensor in depth)
        found.append(f"The depth operators' {count:,} parameters stay in high precision.")
    return found


def blame(module: ModuleError) -> str:
    """Which rounding causes the error, and the largest input channels."""
    part = "activations" if module.activation_error >= module.weight_error else "weights"
    return f"mostly from its {part}; largest input channels {channels(module)}."


def channels(module: ModuleError) -> str:
    """The outlier channels with their ratios."""
    return ", ".join(f"{o.channel} ({o.ratio:.3g}× the median)" for o in module.outliers)


def size(count: int) -> str:
    """Bytes as 12.3 MiB."""
    return f"{count / 2**20:.2f} MiB"


def shapes(shape: Sequence[int]) -> str:
    """A shape as 3 × 4."""
    return " × ".join(str(extent) for extent in shape) or "scalar"
