"""The summary: at most ten lines that say what stands out, then what the rest is like."""

from __future__ import annotations

import math
from collections.abc import Sequence

from residua.diagnose.metric import Model, on_page
from residua.reading import counted

LINES = 10
_PER_KIND = 3


def summary(model: Model) -> list[str]:
    """At most ten sentences: what was looked at, what stands out, and what the rest is like."""
    lines = [_what(model), *_findings(model)][:LINES]
    rest = [sentence for metric in model.metrics for sentence in metric.sentences(model)]
    for sentence in sorted(rest, key=lambda sentence: sentence.rank):
        if len(lines) < LINES - bool(model.skipped):
            lines.append(sentence.text)
    if model.skipped:
        lines.append(f"Not measured: {counted(len(model.skipped), 'thing')}, see the report.")
    return lines


def _what(model: Model) -> str:
    text = model.text
    return (
        f"{model.name}: {model.description}. Loss {model.loss:.4f} nats per token (perplexity "
        f"{math.exp(min(model.loss, 50)):,.1f}) on {counted(text.tokens, 'token')} of {text.source}, "
        f"{counted(text.sequences, 'sequence')} of {text.length}."
    )


def _findings(model: Model) -> list[str]:
    """The first of each kind; how many more there are."""
    defects = [metric for metric in on_page(model) if metric.defect]
    found = {finding.kind for finding in model.findings}
    lines = []
    if not any(kind in found for metric in defects for kind in metric.kinds):
        *names, last = [metric.defect for metric in defects]
        lines.append(f"No {', '.join(names)} or {last} was found.")
    for kind in dict.fromkeys(finding.kind for finding in model.findings):
        own = [finding for finding in model.findings if finding.kind == kind]
        shown = own[: _PER_KIND if len(found) <= 2 else 1]
        lines += [_sentence(finding.words) for finding in shown]
        if len(own) > len(shown):
            lines[-1] = f"{lines[-1][:-1]}; {len(own) - len(shown)} more like it."
    return lines


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def percent(share: float) -> str:
    """A share as people read it: 41 %, 0.40 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 3, 4 and 7`, `layers 3 to 9`."""
    unique = sorted(set(numbers))
    if len(unique) == 1:
        return f"{noun} {unique[0]}"
    if len(unique) > 2 and unique[-1] - unique[0] == len(unique) - 1:
        return f"{noun}s {unique[0]} to {unique[-1]}"
    shown = [str(n) for n in unique]
    if len(shown) > 8:
        return f"{len(shown)} {noun}s from {shown[0]} to {shown[-1]}"
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"
