"""Untrusted names, paths, tokens and messages are shown as text: on a terminal, in Markdown, on a page."""

import html
import io
import random
import re

import pytest
from markdown_it import MarkdownIt
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from residua.report import Link, Page
from residua.report.figures import Curve, curves
from residua.report.plain import PlainConsole, markdown, one_line, outcome, printable
from residua.report.terminal import ProgressBars

HOSTILE = [
    "a | b || c",
    "`code` ``x`` ```py",
    "<img src=x onerror=alert(1)> <!-- x --> </td></table>",
    "[link](https://example.org) ![image](x.png) [a]: x [b][c]",
    "https://example.org www.example.org me@example.org",
    "# heading",
    "- item",
    "1. one",
    "2) two",
    "> quote",
    "[x] done",
    "--- \n\n# new page\r\n| a | b |\n|---|---|",
    "*a* **b** _c_ __d__ ~~e~~ $f$ &lt;g&gt; \\h",
    "block_attnres [-0.1, +0.2] 1.02× (n = 3)",
    "\x1b[31mred\x1b]0;title\x07\x9b2J \u202etxt.exe \udcff\x00",
]
SHOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_only_the_escaped_text(text: str) -> None:
    plain = html.escape(one_line(text))
    assert SHOWN.render(f"# {markdown(text)}") == f"<h1>{plain}</h1>\n"
    assert SHOWN.render(f"- {markdown(text, begins=True)}") == f"<ul>\n<li>{plain}</li>\n</ul>\n"
    cells = SHOWN.render(f"| a | b |\n|---|---|\n| {markdown(text)} | last |\n").split("<tbody>")[1]
    assert re.findall(r"<td>(.*?)</td>", cells) == [plain, "last"]


def test_markdown_round_trips_any_text() -> None:
    source = random.Random(0)
    for _ in range(2000):
        text = "x" + "".join(source.choices("ab1 _*`|[]()<>!#\\&~:/.@-+\n\t\x1b$'\"", k=12))
        shown = html.unescape(SHOWN.render(f"- {markdown(text, begins=True)}"))
        assert shown == f"<ul>\n<li>{one_line(text)}</li>\n</ul>\n"


def test_markdown_has_no_tag_for_simple_renderers() -> None:
    """Python-Markdown, which makes the site, shows a tag after a backslash."""
    assert markdown("a <img src=x onerror=y> & b") == "a &lt;img src=x onerror=y> &amp; b"


def test_markdown_leaves_plain_words_readable() -> None:
    sentence = "block_attnres: lower loss by 0.1234 (n = 3); Δ −0.1 [−0.2, +0.1], 1.02× per step"
    assert markdown(sentence, begins=True) == sentence


@pytest.fixture
def terminal() -> tuple[PlainConsole, io.StringIO]:
    file = io.StringIO()
    return PlainConsole(file=file, force_terminal=True, color_system=None, width=300), file


@pytest.mark.parametrize("text", [*HOSTILE, "[red]x[/blue]", ":smile:", "[/]", "[link=https://x]y[/link]"])
def test_a_console_prints_control_codes_as_text(text: str, terminal: tuple[PlainConsole, io.StringIO]) -> None:
    console, file = terminal
    table = Table(text, title=text)
    table.add_row(text)
    table.add_row(Text(text))
    for shown in (text, Text(text), table, outcome(text)):
        console.print(shown, soft_wrap=True)
    assert not set(file.getvalue()) & set("\x1b\x07\x9b\x00\u202e\udcff")
    assert text.splitlines()[0].partition("\x1b")[0] in file.getvalue()


def test_bars_and_status_lines_show_names_literally(terminal: tuple[PlainConsole, io.StringIO]) -> None:
    console, file = terminal
    with ProgressBars(console) as bars:
        bars.track("[/red]\x1b]0;x\x07")(1, 2)
        bars.stages("[bold]")("[/y]", 1, 2)
    with console.status("[/z]") as status:
        status.update("[/w]")
    assert all(name in file.getvalue() for name in ("[/red]", "[/y]", "[/w]"))
    assert "\x1b]0;" not in file.getvalue()


def test_text_in_every_script_is_unchanged() -> None:
    for text in ("naïve — “x”", "日本語\u3000全角", "क्ष", "👩‍💻", "a\u00a0b", "tab\tand\nline"):
        assert printable(text) == text


def test_a_page_shows_only_the_escaped_text() -> None:
    for text in [*HOSTILE, '"><script>alert(1)</script>', "</script><script>x", "<!--<script>"]:
        page = Page(text, text)
        section = page.section(text, text)
        section.text(text)
        section.facts({text: Link(text, f"javascript:{text}")})
        section.figure(curves([Curve(text, [0.0], [1.0], "#000000")], text, text))
        made = page.html().replace(Page("", "").html(), "")
        assert "<img" not in made and "alert(1)</script>" not in made and "\x1b" not in made and "\u202e" not in made
        assert 'href="javascript:' not in made
        made.encode()


def test_a_progress_bar_on_our_console_needs_no_markup(terminal: tuple[PlainConsole, io.StringIO]) -> None:
    console, file = terminal
    with Progress(console=console):
        console.print("[/x]")
    assert "[/x]" in file.getvalue()


def test_progress_bars_leave_no_empty_line_in_a_file() -> None:
    written = io.StringIO()
    with ProgressBars(PlainConsole(file=written)) as bars:
        bars.track("tokens")(1, 2)
    assert written.getvalue() == ""
