"""The report of a diagnosis: findings as cards, each model as a picture, depth routing, a summary, every metric."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from residua.diagnose.metric import Finding, LayerTrack, Metric, Model, Models, on_page
from residua.diagnose.plots import NONE, colours, owners
from residua.diagnose.schema import Diagnosis
from residua.diagnose.sentences import absent, described, joined, sentence
from residua.reading import counted
from residua.report import Bar, Card, Cell, Column, Owner, Page, Section, Spread, Strip, Value
from residua.report.elements import Tone
from residua.train.telemetry_curves import Records, by_place, said

Trained = Mapping[str, Records]
"""By model, the telemetry records of its run."""
NOT_TRAINED: Trained = MappingProxyType({})
NAMED = 4
"""A title names at most this many models."""
SUMMARY_PLACE = 10
"""Metrics with a lower place are drawn above the summary: depth routing, the tool's main purpose."""
NO_ROUTING = (
    "Depth routing: nothing to show, because the model has no depth weights. For a Residua model that "
    "weights the inputs of each sublayer (Attention Residuals, MUDD, hyper-connections, Multi-Gate Residuals and "
    "others), this section shows its weights and the value of each source."
)
HEALTHY = "Healthy: a loss better than chance, no sinks, no massive activations and no dead layers."
WIDE = 9
"""A table with at most this many columns, not counting the models' names, fits a window of 1,100 pixels."""


def diagnosis_page(diagnosis: Diagnosis, trained: Trained = NOT_TRAINED) -> Page:
    """One page for one model or several side by side; `trained` holds the telemetry of those that are runs."""
    models = diagnosis.models
    page = Page(title(models), _lead(models), "bad" if any(map(defects, models)) else "good")
    add_findings(page.section("Findings", HEALTHY), models)
    picture = page.section(
        "Layer by layer",
        "Healthy: bars that change smoothly from layer to layer. A dead layer writes nothing, and removing "
        "it costs nothing; a massive activation or a sink is a bar far longer than its neighbours.",
    )
    add_picture(picture, models)
    if not any(model.depth_weights for model in models):
        picture.text(NO_ROUTING)
    metrics = on_page(models[0])
    for metric in metrics:
        if metric.page_place < SUMMARY_PLACE:
            metric.draw(page, models)
    _summary(page, models)
    for metric in metrics:
        if metric.page_place >= SUMMARY_PLACE:
            metric.draw(page, models)
    _training(page, models, trained)
    _made(page, models)
    return page


def title(models: Models) -> str:
    """The answer: what is wrong, or where."""
    names = joined([m.name for m in models]) if len(models) <= NAMED else f"{len(models)} models"
    troubled = [m for m in models if defects(m)]
    if not troubled:
        return f"Inside {names}: nothing wrong found"
    if len(models) == 1:
        counts = Counter(finding.kind.replace("_", " ") for finding in defects(models[0]))
        return f"Inside {names}: {joined([_several(kind, count) for kind, count in counts.items()])}"
    where = joined([m.name for m in troubled]) if len(troubled) < NAMED else f"{len(troubled)} of them"
    return f"Inside {names}: findings in {where if len(troubled) < len(models) else 'all of them'}"


def _several(noun: str, count: int) -> str:
    if count > 1:
        return f"{count} {noun}s"
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _lead(models: Models) -> str:
    """What was measured, and on how much text; by model if that differs."""
    source = models[0].text.source
    shown: dict[str, list[str]] = {}
    for m in models:
        shown.setdefault(_amount(m), []).append(m.name)
    each = "; ".join(f"{amount} for {joined(names)}" for amount, names in shown.items())
    text = f"{source}, {each}" if len(shown) > 1 else f"{_amount(models[0])} of {source}"
    return f"The role of depth in {'these models' if len(models) > 1 else 'this model'}: measured on {text}."


def _amount(model: Model) -> str:
    """The amount of text that a model read."""
    text = model.text
    return f"{counted(text.tokens, 'token')} ({counted(text.sequences, 'sequence')} of {text.length})"


def _summary(page: Page, models: Models) -> None:
    """Summarise one model in sentences, several in a table, or in two tables if one would be too wide."""
    section = page.section("Summary", "The remaining numbers. Healthy: close to those of models you trust.")
    if len(models) > 1:
        columns, cells, filled = _columns(models[0]), [_cells(model) for model in models], _filled(models)
        most = math.ceil(len(filled) / math.ceil(len(filled) / WIDE))
        for part in (filled[start : start + most] for start in range(0, len(filled), most)):
            rows = [[owner, *(row[i] for i in part)] for owner, row in zip(owners(models), cells, strict=True)]
            section.table([Column("model", numeric=False), *(columns[i] for i in part)], rows)
        return
    (model,) = models
    section.facts(
        {
            "loss": f"{model.loss:.4f} nats per token",
            "perplexity": f"{math.exp(min(model.loss, 50)):,.1f}",
            "parameters": f"{model.parameters:,}",
            "layers": str(model.layers),
            "width": str(model.width),
        }
    )
    section.points(described(model))


def _columns(model: Model) -> list[Column]:
    return [
        Column("parameters"),
        Column(
            "loss", "nats per token on the text of this page; comparable only between models with the same tokenizer"
        ),
        *(column for metric in on_page(model) for column in metric.columns),
        Column("findings", "number of findings"),
    ]


def _cells(model: Model) -> list[Cell]:
    shown = [cell for metric in on_page(model) for cell in metric.cells(model)]
    return [
        Value(f"{model.parameters / 1e6:.3g} M", key=model.parameters),
        f"{model.loss:.4f}",
        *shown,
        str(len(model.findings)),
    ]


def _filled(models: Models) -> list[int]:
    """The indices of columns that are not entirely empty."""
    rows = [_cells(model) for model in models]
    return [i for i in range(len(rows[0])) if any(row[i] != NONE for row in rows)]


def _training(page: Page, models: Models, trained: Trained) -> None:
    """Draw the training telemetry of the runs over tokens."""
    for m in models:
        records = trained.get(m.name, ())
        if records:
            section = page.section(
                "While it trained" if len(models) == 1 else f"While {m.name} trained",
                "Healthy: peaks that level off, gates and depth weights that settle. Sudden growth of a peak "
                "often precedes a divergence.",
            )
            section.tabs(by_place(records), "A few positions along depth; metrics.jsonl has all of them.")
            for sentence in said(records):
                section.note(sentence)


def _made(page: Page, models: Models) -> None:
    section = page.section("How this was made", "The numbers on this page are in diagnosis.json next to it.")
    for m in models:
        section.subheading(m.name)
        section.facts(
            {
                "model": m.description,
                "folder": m.path or NONE,
                "text": f"{_amount(m)} of {m.text.source}",
                "device": m.device,
                "precision": m.precision or NONE,
                "time": f"{m.seconds:.1f} s",
            }
        )
        for reason in m.skipped:
            section.note(f"Not measured: {reason}")


def add_findings(section: Section, models: Models) -> None:
    """Add a green line for the models without defects, and a card for each kind of finding."""
    clean = [model for model in models if not defects(model)]
    if clean:
        of = "" if len(clean) == len(models) else f"{', '.join(m.name for m in clean)}: "
        section.good(of + absent(clean[0]))
    cards = [card for metric in on_page(models[0]) for kind in metric.kinds if (card := _card(metric, kind, models))]
    section.cards(sorted(cards, key=lambda card: card.tone != "bad"))


def defects(model: Model) -> list[Finding]:
    """The findings that a healthy model would not have."""
    kinds = {kind for metric in model.metrics if metric.defect for kind in metric.kinds}
    return [finding for finding in model.findings if finding.kind in kinds]


def title_of(kind: str) -> str:
    """The title of a kind: "Dead layer" for `dead_layer`."""
    return sentence(kind.replace("_", " "))[:-1]


def _card(metric: type[Metric], kind: str, models: Models) -> Card | None:
    """All findings of one kind; None if there are none."""
    affected = [
        (model, colour, findings)
        for model, colour in zip(models, colours(models), strict=True)
        if (findings := [finding for finding in model.findings if finding.kind == kind])
    ]
    if not affected:
        return None
    tone: Tone = "bad" if metric.defect else "note"
    if len(models) > 1:
        explanations = [(model.name, colour, metric.explain(model, findings)) for model, colour, findings in affected]
        owners = [Owner(name, colour, explained.where, explained.sure) for name, colour, explained in explanations]
        title = f"{title_of(kind)} in {len(affected)} of {len(models)} models"
        return Card(title, facts={"What to do": explanations[0][2].remedy}, tone=tone, owners=owners)
    model, _, findings = affected[0]
    explained = metric.explain(model, findings)
    return Card(
        title_of(kind) if len(findings) == 1 else f"{title_of(kind)} × {len(findings)}",
        sentence(findings[0].words),
        {"Where": explained.where, "How sure": explained.sure, "What to do": explained.remedy},
        tone=tone,
        more=[sentence(finding.words) for finding in findings[1:]],
    )


def add_picture(section: Section, models: Models) -> None:
    """Draw every model's layers from bottom to top, with every track that any model has; the scales are shared."""
    tracks = [track for metric in models[0].metrics for track in metric.tracks(models) if any(track.cells)]
    strips = [
        Strip(model.name, colour, _rows(model, index, tracks))
        for index, (model, colour) in enumerate(zip(models, colours(models), strict=True))
    ]
    section.strips(
        tracks,
        strips,
        "Layers from bottom to top. Red cells are findings, blue cells are notes; hatched cells were not "
        "measured or do not exist." + (" All models share the scales." if len(models) > 1 else ""),
    )


def _rows(model: Model, index: int, tracks: Sequence[LayerTrack]) -> dict[str, list[Bar | Spread | None]]:
    """The model's cells from the final norm down to layer 0."""
    last = [model.layers] if any(model.layers in track.cells[index] for track in tracks) else []
    return {
        "final norm" if layer == model.layers else f"layer {layer}": [track.cells[index].get(layer) for track in tracks]
        for layer in (*last, *reversed(range(model.layers)))
    }
