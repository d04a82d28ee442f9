"""Make untrusted text (names, paths, tokens, messages) safe to display.

A terminal executes control characters, rich interprets `[red]`, Markdown interprets `|` and `<`. Commands print through
`PlainConsole`, pages through `escape`, Markdown through `markdown`.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_KEPT = "\n\t"
# characters that reverse text direction, which can disguise one name as another
_TURNING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# also text that GitHub links automatically, and underscores except inside words
_MARKS = re.compile(r"[\\`*|~$@]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
_BLOCK = re.compile(r"^(\d+(?=[.)])|)([-+=.)#>]|\[(?=[ xX]\]))")


def printable(text: str) -> str:
    """Replace lone surrogates and control characters that a terminal would execute (all but newlines and tabs)."""
    return text if text.isprintable() else "".join(c if _harmless(c) else REPLACEMENT for c in text)


def one_line(text: str) -> str:
    """The printable text on one line, with single spaces."""
    return printable(" ".join(text.split()))


def _harmless(c: str) -> bool:
    return c in _KEPT or (unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") and c not in _TURNING)


def escape(text: str) -> str:
    """The printable text for HTML, including attributes, and for Plotly's labels."""
    return html.escape(printable(text))


def link(target: str) -> str:
    """A relative path or an #anchor as a link target; never a scheme such as javascript:."""
    return quote(target, safe="/#.-_~", errors="surrogateescape")


def markdown(text: str, *, begins: bool = False) -> str:
    """The text on one line for Markdown, escaped so that it starts no cell, code, HTML, link or image.

    With `begins`, it starts a line, where `#` or `1.` would begin a heading or a list. `<` and `&` become entities,
    since not every Markdown supports a backslash before them.
    """
    escaped = _MARKS.sub(r"\\\g<0>", one_line(text)).replace("&", "&amp;").replace("<", "&lt;")
    return _BLOCK.sub(r"\1\\\2", escaped) if begins else escaped


class PlainConsole(Console):
    """A console that prints text verbatim: no markup, no emoji codes, no control characters."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        """Show a line with a spinner."""
        return _PlainStatus(_unmarked(status), console=self, **settings)


class _PlainStatus(Status):
    def update(self, status: RenderableType | None = None, **settings: Any) -> None:
        super().update(None if status is None else _unmarked(status), **settings)


def outcome(text: str, *, good: bool = True) -> Text:
    """A line about a finished task, with a tick or a cross."""
    return Text.assemble(("✓ ", "green") if good else ("✗ ", "red"), text)


def _unmarked(status: RenderableType) -> RenderableType:
    return Text(status) if isinstance(status, str) else status
