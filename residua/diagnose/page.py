"""The report of a diagnosis: the summary first, then each metric with one sentence on what healthy looks like."""

from __future__ import annotations

from residua.diagnose.metric import Model, Models, on_page
from residua.diagnose.plots import NONE
from residua.diagnose.schema import Diagnosis
from residua.report import Column, Page


def diagnosis_page(diagnosis: Diagnosis) -> Page:
    """One page for one model or for several side by side."""
    models = diagnosis.models
    names = " and ".join([", ".join(m.name for m in models[:-1])] * (len(models) > 1) + [models[-1].name])
    page = Page(f"Inside {names}", _lead(models))
    _summary(page, models)
    for metric in on_page(models[0]):
        metric.draw(page, models)
    _made(page, models)
    return page


def _lead(models: Models) -> str:
    text = models[0].text
    return (
        f"What depth does in {'these models' if len(models) > 1 else 'this model'}: measured on {text.tokens:,} tokens "
        f"({text.sequences} sequences of {text.length}) of {text.source}."
    )


def _summary(page: Page, models: Models) -> None:
    section = page.section("Summary", "A healthy model has no sinks, no massive activations and no dead layers.")
    if len(models) > 1:
        section.table(_columns(models[0]), [_row(model) for model in models])
    for model in models:
        if len(models) > 1:
            section.subheading(model.name)
        section.points(model.summary)
        if len(model.findings) > 6:
            section.text(f"All {len(model.findings)} findings are listed under “How this was made”.")


def _columns(model: Model) -> list[Column]:
    return [
        Column("model", numeric=False),
        Column("parameters"),
        Column("loss", "nats per token on the text of this page; comparable between models of one tokenizer only"),
        *(column for metric in on_page(model) for column in metric.columns),
        Column("findings", "how many things stand out"),
    ]


def _row(model: Model) -> list[str]:
    cells = [cell for metric in on_page(model) for cell in metric.cells(model)]
    return [model.name, f"{model.parameters:,}", f"{model.loss:.4f}", *cells, str(len(model.findings))]


def _made(page: Page, models: Models) -> None:
    section = page.section("How this was made", "The numbers behind this page are in diagnosis.json beside it.")
    for m in models:
        section.subheading(m.name)
        section.facts(
            {
                "model": m.description,
                "folder": m.path or NONE,
                "text": f"{m.text.tokens:,} tokens of {m.text.source}",
                "device": m.device,
                "time": f"{m.seconds:.1f} s",
            }
        )
        if m.findings:
            section.points(f.words for f in m.findings)
        for reason in m.skipped:
            section.note(f"Not measured: {reason}")
