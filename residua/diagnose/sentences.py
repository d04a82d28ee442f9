"""The summary: at most ten lines, first on what stands out, then on the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from residua.diagnose.metric import Model, on_page
from residua.reading import counted

LINES = 10
_PER_KIND = 3
CLEAR = 2.0
"""A finding is clear if it exceeds its limit by this factor."""
MIN_SEQUENCES = 4
"""With fewer sequences than this, a finding may reflect the text and not the model."""


def summary(model: Model) -> list[str]:
    """At most ten sentences: the model and text, the findings, and the rest."""
    lines = [_what(model), *_findings(model)][:LINES]
    lines += described(model)[: max(0, LINES - bool(model.skipped) - len(lines))]
    if model.skipped:
        lines.append(f"Not measured: {counted(len(model.skipped), 'thing')}, see the report.")
    return lines


def described(model: Model) -> list[str]:
    """Describe the model apart from its findings, most important facts first."""
    rest = [sentence for metric in model.metrics for sentence in metric.sentences(model)]
    return [sentence.text for sentence in sorted(rest, key=lambda sentence: sentence.rank)]


def _what(model: Model) -> str:
    text = model.text
    return (
        f"{model.name}: {model.description}. Loss {model.loss:.4f} nats per token (perplexity "
        f"{math.exp(min(model.loss, 50)):,.1f}) on {counted(text.tokens, 'token')} of {text.source}, "
        f"{counted(text.sequences, 'sequence')} of {text.length}."
    )


def _findings(model: Model) -> list[str]:
    """The first finding of each kind, and the number of others."""
    defects = [kind for metric in model.metrics if metric.defect for kind in metric.kinds]
    kinds = {finding.kind for finding in model.findings}
    lines = [] if kinds.intersection(defects) else [absent(model)]
    for kind in dict.fromkeys(finding.kind for finding in model.findings):
        findings = [finding for finding in model.findings if finding.kind == kind]
        shown = findings[: _PER_KIND if len(kinds) <= 2 else 1]
        lines += [sentence(finding.words) for finding in shown]
        if len(findings) > len(shown):
            lines[-1] = f"{lines[-1][:-1]}; {len(findings) - len(shown)} more of this kind."
    return lines


def absent(model: Model) -> str:
    """For a model without defects: the defects that were checked."""
    *names, last = [name for metric in on_page(model) if metric.defect and (name := metric.absence(model))]
    return f"No {', '.join(names)} or {last} was found."


def sentence(words: str) -> str:
    """The words with a capital letter and a full stop."""
    return f"{words[0].upper()}{words[1:]}."


def sureness(measured: str, times: float, model: Model) -> str:
    """The certainty of a finding based on a limit: by how much it exceeds the limit, and on how much text.

    `measured` states the number and its limit; `times` is their ratio.
    """
    text = model.text
    grade = "Clear" if times >= CLEAR else "Near the limit"
    again = " Measure again with more text (--tokens)." if times < CLEAR or text.sequences < MIN_SEQUENCES else ""
    return f"{grade}: {measured}, on {text.tokens:,} tokens in {counted(text.sequences, 'sequence')}.{again}"


def token(text: str, number: int) -> str:
    """Name a token by its text, and by its id alone if the text is unknown."""
    return f"{text!r} (id {number})" if text and text != f"#{number}" else f"id {number}"


def short(value: float) -> str:
    """Format a number in at most five characters, for narrow places: 0.003, 0.31, 1.8, 41, 970, 12k."""
    size = abs(value)
    if size >= 9999.5:
        return f"{value / 1000:.0f}k" if size < 999_500 else f"{value:.0e}".replace("e+0", "e")
    return f"{value:.0f}" if size >= 9.95 else f"{value:.1f}" if size >= 0.995 else f"{value:.2g}"


def joined(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def percent(share: float) -> str:
    """Format a share as a percentage: 41 %, 0.40 %."""
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
