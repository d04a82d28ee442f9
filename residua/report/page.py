"""A self-contained HTML page: text, tables and Plotly figures, light and dark, for screen, phone and paper.

A page has a title that gives the answer, a lead paragraph, sections, and a footer that says how it was made. Callers
pass plain text, which is escaped here; no caller writes HTML. Its Content-Security-Policy forbids network requests.

`section.py` provides cards for findings, collapsible blocks for repetition, sortable tables, and figures. Figures
appear side by side or in tabs, with a legend and text for screen readers. A series keeps its colour (`theme.colour`).
It is highlighted everywhere when the reader points at its line, legend or row (`Series` cells, names of `Curve` and
`Estimate`).

The page embeds plotly.js. The full build is 4.8 MB. The cartesian build draws everything Residua needs (lines, bars,
heat maps) in 1.5 MB, or 0.66 MB as base64 of its gzip, which `page.js` unpacks. A file next to the page could be shared
only by the pages of one folder, and a page mailed on its own would lose its plots. The file is the unchanged
`plotly-cartesian.min.js` from npm's plotly.js-cartesian-dist-min (MIT, plotly-LICENSE.txt).
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path

from residua.files import write_atomically
from residua.report import theme
from residua.report.elements import Cell, breakable
from residua.report.plain import escape
from residua.report.section import Section, Tone, facts_list


class Page:
    """A report. Add sections, then `write` it; `tone` colours the mark before the title."""

    def __init__(self, title: str, lead: str, tone: Tone = "") -> None:
        self.title = title
        self.lead = lead
        self.tone = tone
        self._sections: list[Section] = []
        self._provenance: dict[str, Cell] = {}
        self._anchors: set[str] = set()

    def section(self, title: str, look_for: str = "") -> Section:
        """Append a section; `look_for` says in one sentence what it shows and what healthy looks like."""
        section = Section(title, look_for, self._new_anchor)
        self._sections.append(section)
        return section

    def made(self, facts: Mapping[str, Cell]) -> None:
        """Set the footer on how the page was made: date, hardware, versions, commit, command."""
        self._provenance |= facts

    def html(self, live: str = "", style: str = "") -> str:
        """The whole page as text. `live` is a script that may poll the page's own server; `style` is CSS for it."""
        contents = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in self._sections)
        scripts = (
            f'<script type="application/json" id="themes">{theme.templates_json()}</script>{plotly_script()}'
            if any(section.has_figures for section in self._sections)
            else ""
        )
        return _FRAME.format(
            title=escape(self.title),
            shown_title=breakable(self.title),
            tone=self.tone,
            lead=escape(self.lead),
            contents=contents,
            body="".join(section.html() for section in self._sections),
            made=facts_list(self._provenance),
            style=asset("page.css") + asset("cards.css") + style,
            scripts=f"{scripts}<script>{asset('page.js')}</script>" + (f"<script>{live}</script>" if live else ""),
            connect="; connect-src 'self'" if live else "",
            foot=_SERVED if live else _ALONE,
        )

    def write(self, path: str | Path) -> Path:
        target = Path(path)
        write_atomically(target, self.html(), parents=True)
        return target

    def _new_anchor(self, title: str) -> str:
        words = "".join(c if c.isalnum() and c.isascii() else " " for c in title.lower()).split()
        stem = anchor = "-".join(words) or "section"
        number = 2
        while anchor in self._anchors:
            anchor, number = f"{stem}-{number}", number + 1
        self._anchors.add(anchor)
        return anchor


@cache
def asset(name: str, package: str = "residua.report") -> str:
    """The text of a style sheet or a script."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


_ALONE = "Made by Residua. This page is a single file and works offline."
_SERVED = "Served by Residua on the machine with these runs; it contacts no other machine."
_FRAME = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:{connect}">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header data-tone="{tone}">
<div><h1>{shown_title}</h1>
<p class="lead">{lead}</p></div>
<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button>
</header>
<div class="columns">
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<main><noscript><p class="note">The plots need JavaScript; text and tables do not.</p></noscript>{body}</main>
</div>
<footer>{made}<p>{foot}</p></footer>
{scripts}
</body>
</html>
"""


PLOTLY_VERSION = "4.1.1"
PLOTLY_SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""The hash of the unpacked file."""
_PLOTLY = "plotly-cartesian.min.js.gz"


def packed_plotly() -> bytes:
    """The gzipped plotly.js."""
    return files("residua.report").joinpath(_PLOTLY).read_bytes()


@cache
def plotly_script() -> str:
    """The element that embeds plotly.js; `page.js` unpacks and runs it before drawing."""
    return f'<script type="application/gzip" id="plotly">{b64encode(packed_plotly()).decode()}</script>'
