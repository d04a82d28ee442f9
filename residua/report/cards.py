"""Cards: one thing to know each, with what it is, where, how sure that is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from residua.report.cells import breakable
from residua.report.plain import escape

Tone = Literal["bad", "note", "good"]
_SIGNS: dict[Tone, tuple[str, str]] = {"bad": ("!", "Problem"), "note": ("i", "Note"), "good": ("✓", "Good")}


@dataclass(frozen=True)
class Owner:
    """One of several that a card is about: its name and colour, where it has the thing, and how sure that is."""

    name: str
    colour: str
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Card:
    """A title, a sentence, further `points`, and facts by name; empty facts are left out. `more` is folded."""

    title: str
    text: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    tone: Tone = "bad"
    points: Sequence[str] = ()
    owners: Sequence[Owner] = ()
    more: Sequence[str] = ()


def cards_html(cards: Iterable[Card]) -> str:
    """The cards side by side, as many in a row as there is room for."""
    return f'<div class="cards">{"".join(map(_card, cards))}</div>'


def good_html(sentence: str) -> str:
    """One green line: nothing is wrong."""
    return f'<p class="good is-good">{_sign("good")}{escape(sentence)}</p>'


def owner_html(name: str, colour: str) -> str:
    """A name with its colour."""
    return f'<span class="owner"><i style="background:{escape(colour)}"></i>{breakable(name)}</span>'


def _card(card: Card) -> str:
    items = "".join([*(f"<li>{escape(point)}</li>" for point in card.points), *map(_owner, card.owners)])
    text = f"<p>{escape(card.text)}</p>" if card.text else ""
    facts = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in card.facts.items() if v)
    return (
        f'<article class="card is-{card.tone}"><h3>{_sign(card.tone)}{escape(card.title)}</h3>{text}'
        f"{f'<ul>{items}</ul>' if items else ''}"
        f"{f'<dl>{facts}</dl>' if facts else ''}{_more(card.more)}</article>"
    )


def _owner(owner: Owner) -> str:
    detail = f"<small>{escape(owner.detail)}</small>" if owner.detail else ""
    name = owner_html(owner.name, owner.colour)
    return f'<li data-series="{escape(owner.name)}">{name} {escape(owner.text)}{detail}</li>'


def _sign(tone: Tone) -> str:
    shown, spoken = _SIGNS[tone]
    return f'<span class="sign" aria-hidden="true">{shown}</span><span class="spoken">{spoken}: </span>'


def _more(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<details><summary>{len(sentences)} more</summary><ul>{items}</ul></details>"
