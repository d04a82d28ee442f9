"""Cards: one thing to know each, with what it is, where, how sure that is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from residua.report.plain import escape

Tone = Literal["bad", "note", "good"]
_SIGNS: dict[Tone, tuple[str, str]] = {"bad": ("!", "Problem"), "note": ("i", "Note"), "good": ("✓", "Good")}


@dataclass(frozen=True)
class Card:
    """A title, a sentence, and facts by name; empty facts are left out. `more` are further sentences, folded.

    `of` names whose card it is, where a page is about several; `colour` is that one's colour on the page.
    """

    title: str
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tone: Tone = "bad"
    of: str = ""
    colour: str = ""
    more: Sequence[str] = ()


def cards_html(cards: Iterable[Card]) -> str:
    """The cards side by side, as many in a row as there is room for."""
    return f'<div class="cards">{"".join(map(_card, cards))}</div>'


def good_html(sentence: str) -> str:
    """One green line: nothing is wrong."""
    return f'<p class="good">{_sign("good")}{escape(sentence)}</p>'


def owner_html(name: str, colour: str) -> str:
    """A name with its colour."""
    return f'<span class="owner"><i style="background:{escape(colour)}"></i>{escape(name)}</span>'


def _card(card: Card) -> str:
    owner = f"<p>{owner_html(card.of, card.colour)}</p>" if card.of else ""
    text = f"<p>{escape(card.text)}</p>" if card.text else ""
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in card.facts.items() if v)
    return (
        f'<article class="card {card.tone}"><h3>{_sign(card.tone)}{escape(card.title)}</h3>{owner}{text}'
        f"{f'<dl>{facts}</dl>' if facts else ''}{_more(card.more)}</article>"
    )


def _sign(tone: Tone) -> str:
    shown, spoken = _SIGNS[tone]
    return f'<span class="sign" aria-hidden="true">{shown}</span><span class="spoken">{spoken}: </span>'


def _more(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<details><summary>{len(sentences)} more</summary><ul>{items}</ul></details>"
