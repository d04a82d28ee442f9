"""The report of a quantization: the cost first, then the modules and channels that cause it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from residua.quantize import result as sentences
from residua.quantize.result import ERROR_TOKENS, ModuleError, QuantizationResult, UnquantizedTensor, perplexity
from residua.reading import counted
from residua.report import Bar, Card, Column, Page, Section, Spread, Strip, Track, Value, theme
from residua.report.elements import Tone
from residua.report.figures import Curve, Figure, curves

WORST_SHOWN = 12
NAMED = 4
"""A card names at most this many modules."""


def quantization_page(result: QuantizationResult) -> Page:
    """The page of one quantized model."""
    page = Page(
        _title(result),
        f"{result.model}, {result.words}{sentences.smoothing(result)}. Losses are nats per token on "
        f"{result.validation_tokens:,} validation tokens.",
        "good" if result.cost <= sentences.HEALTHY else "unsure" if result.cost <= sentences.DEAR else "bad",
    )
    _verdict(page, result)
    if result.modules:
        _picture(page, result)
        _modules(page, result)
    _exempting(page, result)
    _kept(page, result)
    _provenance(page, result)
    return page


def _title(result: QuantizationResult) -> str:
    if abs(result.cost) < sentences.WORTH_MENTIONING:
        return f"{result.scheme} costs this model nothing"
    if result.cost < 0:
        return f"{result.scheme} costs this model nothing: the loss falls by {-result.cost:.4f} nats"
    return f"{result.scheme} costs {result.cost:.4f} nats per token"


def _verdict(page: Page, result: QuantizationResult) -> None:
    section = page.section(
        "Verdict", "The cost, the source of the error, and remedies. Healthy: a few hundredths of a nat or less."
    )
    tone: Tone = "good" if result.cost <= sentences.HEALTHY else "note" if result.cost <= sentences.DEAR else "bad"
    cards = [Card("What it costs", sentences.verdict(result), tone=tone)]
    if result.modules:
        odd = sentences.standing_out(result)
        names = ", ".join(sentences.place(module.name) for module in odd[:NAMED])
        shown = f"{names}{f' and {len(odd) - NAMED} more' if len(odd) > NAMED else ''}"
        facts = {
            "Stands out": shown
            or f"No module: none has {sentences.STANDS_OUT:g} times the error of the median module.",
            "All modules": sentences.total(result),
        }
        cards.append(Card("Where the error comes from", sentences.worst(result), facts, tone="bad" if odd else "good"))
    helps = sentences.helps(result) or ["Nothing needs help." if tone == "good" else "Nothing was tried."]
    cards.append(Card("What helps", helps[0], tone="note", points=helps[1:]))
    section.cards(cards)
    _losses(section, result)
    section.points(sentences.sentences(result)[1 + bool(result.modules) + bool(sentences.exempting(result)) :])
    section.facts(
        {
            "weights": f"{sentences.size(result.bytes_before)} → {sentences.size(result.bytes_after)}",
            "text": result.text.rpartition("/")[2],
            "device": result.device,
            "calibration": counted(result.calibration_sequences, "sequence")
            if result.calibration_sequences
            else "none needed",
        }
    )


def _losses(section: Section, result: QuantizationResult) -> None:
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


def _picture(page: Page, result: QuantizationResult) -> None:
    """Draw every layer's modules from bottom to top; modules outside the layers have separate rows below."""
    section = page.section(
        "Layer by layer",
        "Healthy: bars of similar length. A red cell is a module whose error stands out; look at its largest channel.",
    )
    placed = {place: m for m in result.modules if (place := sentences.split(m.name)) is not None}
    parts = list(dict.fromkeys(part for _, part in placed))
    highest = max(module.error for module in result.modules) or 1.0
    peak = max([10.0, *(o.ratio for m in result.modules for o in m.outliers)])
    odd = sentences.standing_out(result)
    meaning = (
        "Error of the module's output when it alone is rounded. Bars: from its activations (above) and from its "
        "weights (below); the number is the error from both."
    )
    tracks = [Track(part, f"0 to {highest:.0%}", meaning) for part in parts]
    tracks.append(
        Track("channel", f"log, 1 to {peak:.3g}×", "Peak of the largest input channel over the median channel's.")
    )
    rows: dict[str, list[Bar | Spread | None]] = {}
    for layer in sorted({layer for layer, _ in placed}, reverse=True):
        modules = [placed.get((layer, part)) for part in parts]
        cells = [None if m is None else _bar(m, highest, m in odd) for m in modules]
        rows[f"layer {layer}"] = [*cells, _channel([m for m in modules if m is not None], peak)]
    for module in (m for m in result.modules if sentences.split(m.name) is None):
        empty = [None] * (len(parts) - 1)
        rows[module.name] = [_bar(module, highest, module in odd), *empty, _channel([module], peak)]
    section.strips(
        tracks,
        [Strip(result.scheme, theme.colour(1), rows)],
        "Layers from bottom to top. Red cells stand out; hatched ones are in high precision or do not exist.",
    )


def _bar(module: ModuleError, highest: float, odd: bool) -> Bar:
    lengths = (module.activation_error / highest, module.weight_error / highest)
    words = f"{module.name}: {module.error:.2%} error, {sentences.blame(module)}"
    return Bar(lengths, f"{module.error:.1%}", flag="bad" if odd else "", words=words)


def _channel(modules: Sequence[ModuleError], peak: float) -> Bar | None:
    """The largest input channel of these modules, on a logarithmic scale."""
    outliers = [(outlier, module) for module in modules for outlier in module.outliers]
    if not outliers:
        return None
    outlier, module = max(outliers, key=lambda pair: pair[0].ratio)
    length = math.log(max(outlier.ratio, 1.0)) / math.log(peak)
    return Bar((length,), f"{outlier.ratio:.3g}×", words=f"channel {outlier.channel} of {module.name}")


def _modules(page: Page, result: QuantizationResult) -> None:
    section = page.section(
        "Error by module",
        "Each module is rounded alone, on its inputs in the exact model. Healthy: similar errors. A module "
        "that stands out has outlier channels in its input or weights.",
    )
    views = {
        "both": _along_depth(result, lambda module: module.error),
        "activations only": _along_depth(result, lambda module: module.activation_error),
        "weights only": _along_depth(result, lambda module: module.weight_error),
    }
    figures = {title: figure for title, figure in views.items() if figure is not None}
    if figures:
        section.tabs(figures, "Relative error of each module's output along depth, one line for each part of a layer.")
    columns = [
        Column("module", numeric=False),
        Column("shape"),
        Column("error", f"‖rounded − exact‖ / ‖exact‖ of the output, over the first {ERROR_TOKENS:,} evaluated tokens"),
        Column("activations", "the same with only the activations rounded"),
        Column("weights", "the same with only the weights rounded"),
        Column("largest input channels", "their peak over the median channel's peak, and their share of the error from "
               "rounding the activations", numeric=False),
    ]  # fmt: skip
    section.subheading(f"The worst {min(WORST_SHOWN, len(result.modules))}")
    section.table(columns, [_row(module) for module in result.worst[:WORST_SHOWN]])
    if result.unsmoothed:
        section.note(
            f"SmoothQuant did not smooth the inputs of {', '.join(result.unsmoothed)}: "
            f"{'no factor can be folded there.' if result.inside else 'without --inside it smooths only after norms.'}"
        )


def _along_depth(result: QuantizationResult, error: Callable[[ModuleError], float]) -> Figure | None:
    """Draw the error over layers, one line per part; None if no module belongs to a layer."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for module in result.modules:
        place = sentences.split(module.name)
        if place is not None:
            lines.setdefault(place[1], []).append((place[0], error(module)))
    series = []
    for index, (part, points) in enumerate(lines.items()):
        x, y = [x for x, _ in points], [y for _, y in points]
        series.append(Curve(part, x, y, theme.colour(index + 1), markers=True, symbol=theme.symbol(index)))
    highest = max((m.error for m in result.modules), default=0.0)
    bounds = (0.0, 1.05 * highest)
    if not series:
        return None
    return curves(series, "layer", "relative error of the output", whole_x=True, y_range=bounds, height=360)


def _row(module: ModuleError) -> list[str | Value]:
    channels = ", ".join(f"{o.channel}: {o.ratio:.3g}×" for o in module.outliers)
    shares = ", ".join(f"{o.share:.0%}" for o in module.outliers)
    errors = [f"{value:.2%}" for value in (module.error, module.activation_error, module.weight_error)]
    name = Value(module.name, sentences.place(module.name)) if sentences.split(module.name) else module.name
    return [name, sentences.shapes(module.shape), *errors, Value(channels, f"{shares} of the error")]


def _exempting(page: Page, result: QuantizationResult) -> None:
    if not result.probes:
        return
    section = page.section(
        "Gain from exempting a module",
        "Each of the worst modules left in high precision in turn. If the gain is worth it, add the module "
        "to --exempt.",
    )
    columns = [Column("module", numeric=False), Column("loss"), Column("gain", "nats saved by exempting it")]
    section.table(columns, [[p.module, f"{p.loss:.4f}", f"{p.gain:+.4f}"] for p in result.probes])


def _kept(page: Page, result: QuantizationResult) -> None:
    section = page.section(
        "What stays in high precision", "Small parts that cost little in high precision, and all depth operators."
    )
    for reason in sorted({tensor.reason for tensor in result.kept}):
        tensors = [tensor for tensor in result.kept if tensor.reason == reason]
        section.subheading(f"{reason[0].upper()}{reason[1:]}: {sum(t.parameters for t in tensors):,} parameters")
        columns = [Column("tensor", numeric=False), Column("shape"), Column("how many")]
        alike = Counter((_name(tensor), sentences.shapes(tensor.shape)) for tensor in tensors)
        section.table(columns, [[name, shape, str(count)] for (name, shape), count in alike.items()])


def _name(tensor: UnquantizedTensor) -> str:
    """The tensor's name, with layer numbers replaced by * except for depth operators and exempted tensors."""
    return tensor.name if tensor.reason in ("depth operator", "exempted") else re.sub(r"\b\d+\b", "*", tensor.name)


def _provenance(page: Page, result: QuantizationResult) -> None:
    options = [f"--scheme {result.scheme}"]
    if result.alpha is not None:
        options.append(f"--smooth {result.alpha:g}")
    if result.calibration_sequences:
        options.append(f"--calibration {result.calibration_sequences}")
    if result.inside:
        options.append("--inside")
    options += [f"--exempt '{pattern}'" for pattern in result.exempt]
    section = page.section("How this was made")
    section.code(f"residua quantize {result.model} {' '.join(options)} --out FOLDER")
