"""The report of a quantization: the cost first, then the modules and channels that cause it."""

from __future__ import annotations

import re
from collections import Counter

from residua.quantize import sentences
from residua.quantize.schema import KeptTensor, ModuleError, QuantizationResult, perplexity
from residua.reading import counted
from residua.report import Column, Page, Value, theme
from residua.report.figures import grouped_bars

WORST_SHOWN = 12


def quantization_page(result: QuantizationResult) -> Page:
    """The page of one quantized model."""
    page = Page(
        f"{result.scheme}: what low precision costs",
        f"{result.model}, {result.words}{sentences.smoothing(result)}. Losses are nats per token on "
        f"{result.validation_tokens:,} validation tokens.",
    )
    _verdict(page, result)
    _modules(page, result)
    _exempting(page, result)
    _kept(page, result)
    _provenance(page, result)
    return page


def _verdict(page: Page, result: QuantizationResult) -> None:
    section = page.section("Verdict", "Healthy: low precision adds a few hundredths of a nat or less.")
    rows = [("high precision", result.loss_before)]
    if result.loss_folded is not None:
        rows.append(("after folding, still in high precision", result.loss_folded))
    if result.loss_without_exemptions is not None:
        rows.append((f"{result.scheme}, nothing exempt", result.loss_without_exemptions))
    rows.append((result.scheme, result.loss_after))
    columns = [
        Column("model", numeric=False),
        Column("loss", "cross-entropy in nats per token on the fixed validation set"),
        Column("Δ", "loss minus that in high precision"),
        Column("perplexity", "e^loss"),
    ]
    cells = [
        [name, f"{loss:.4f}", f"{loss - result.loss_before:+.4f}", f"{perplexity(loss):.3f}"] for name, loss in rows
    ]
    section.table(columns, cells, emphasised=[len(cells) - 1])
    section.points(sentences.sentences(result)[1:])
    section.facts(
        {
            "weights": f"{sentences.size(result.bytes_before)} → {sentences.size(result.bytes_after)}",
            "text": result.text.rpartition("/")[2],
            "device": result.device,
            "calibration": counted(result.calibration_sequences, "sequence")
            if result.alpha is not None
            else "none needed",
        }
    )


def _modules(page: Page, result: QuantizationResult) -> None:
    section = page.section(
        "Error by module",
        "Each module rounded alone, on its inputs in the exact model. Healthy: all alike. A module that stands out has "
        "outlier channels in its input or in its weights.",
    )
    order = result.modules
    parts = {
        "both": [m.error for m in order],
        "activations only": [m.activation_error for m in order],
        "weights only": [m.weight_error for m in order],
    }
    section.figure(
        grouped_bars([m.name for m in order], parts, theme.SERIES[:3], "relative error of the output", height=420),
        "In the order of the forward pass.",
    )
    columns = [
        Column("module", numeric=False),
        Column("shape"),
        Column("error", "‖rounded − exact‖ / ‖exact‖ of the output, over all evaluated tokens"),
        Column("activations", "the same with only the activations rounded"),
        Column("weights", "the same with only the weights rounded"),
        Column("largest input channels", "their peak over the median channel's peak, and their share of the error from "
               "rounding the activations", numeric=False),
    ]  # fmt: skip
    section.subheading(f"The worst {min(WORST_SHOWN, len(result.modules))}")
    section.table(columns, [_row(module) for module in result.worst[:WORST_SHOWN]])
    if result.unsmoothed:
        section.note(
            f"SmoothQuant did not reach the inputs of {', '.join(result.unsmoothed)}: "
            f"{'no factor can be folded there.' if result.inside else 'without --inside it only smooths after norms.'}"
        )


def _row(module: ModuleError) -> list[str | Value]:
    channels = ", ".join(f"{o.channel}: {o.ratio:.3g}×" for o in module.outliers)
    shares = ", ".join(f"{o.share:.0%}" for o in module.outliers)
    errors = [f"{value:.2%}" for value in (module.error, module.activation_error, module.weight_error)]
    return [module.name, sentences.shapes(module.shape), *errors, Value(channels, f"{shares} of the error")]


def _exempting(page: Page, result: QuantizationResult) -> None:
    if not result.probes:
        return
    section = page.section(
        "What exempting a module would gain",
        "The worst modules, each left in high precision in turn. If a gain is worth it, add the module to --exempt.",
    )
    columns = [Column("module", numeric=False), Column("loss"), Column("gain", "nats that exempting it saves")]
    section.table(columns, [[p.module, f"{p.loss:.4f}", f"{p.gain:+.4f}"] for p in result.probes])


def _kept(page: Page, result: QuantizationResult) -> None:
    section = page.section(
        "What stays in high precision", "Small parts that cost little to keep, and all depth operators."
    )
    for reason in sorted({tensor.reason for tensor in result.kept}):
        tensors = [tensor for tensor in result.kept if tensor.reason == reason]
        section.subheading(f"{reason[0].upper()}{reason[1:]}: {sum(t.parameters for t in tensors):,} parameters")
        columns = [Column("tensor", numeric=False), Column("shape"), Column("how many")]
        alike = Counter((_name(tensor), sentences.shapes(tensor.shape)) for tensor in tensors)
        section.table(columns, [[name, shape, str(count)] for (name, shape), count in alike.items()])


def _name(tensor: KeptTensor) -> str:
    """The tensor's name; layer numbers become * except for depth operators and exempted tensors."""
    return tensor.name if tensor.reason in ("depth operator", "exempted") else re.sub(r"\b\d+\b", "*", tensor.name)


def _provenance(page: Page, result: QuantizationResult) -> None:
    options = [f"--scheme {result.scheme}"]
    if result.alpha is not None:
        options.append(f"--smooth {result.alpha:g} --calibration {result.calibration_sequences}")
    if result.inside:
        options.append("--inside")
    options += [f"--exempt '{pattern}'" for pattern in result.exempt]
    section = page.section("How this was made")
    section.code(f"residua quantize {result.model} {' '.join(options)} --out FOLDER")
