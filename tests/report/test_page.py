"""The page builder: everything is escaped, plotly.js is there once, nothing asks the network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from residua.report import Column, Link, Page, Value
from residua.report.figures import Curve, curves, grouped_bars, heatmap

EVIL = '<script>alert("x")</script>&\'</b>'


def one_of_everything(text: str) -> Page:
    page = Page(text, text)
    section = page.section(text, text)
    section.text(text)
    section.note(text)
    section.code(text)
    section.subheading(text)
    section.points([text])
    section.facts({text: text, "link": Link(text, f"runs/{text}")})
    section.table([Column(text, text), Column("b")], [[Value(text, text), Link(text, "#x")]])
    line = curves([Curve(text, [0, 1], [1.0, 2.0], "#2f7ed8")], text, text)
    section.figure(line, text)
    section.tabs({text: line, "other": heatmap([[1.0, None]], [text, "2"], [text], text, text, text)}, text)
    return page


def test_nothing_a_caller_passes_becomes_markup() -> None:
    html = one_of_everything(EVIL).html()
    assert EVIL not in html
    # What is left between our own scripts holds no foreign element.
    assert "<script>alert" not in html and "</b>" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)


def test_plotly_is_embedded_once_however_many_figures() -> None:
    html = one_of_everything("x").html()
    assert html.count("plotly.js v") == 1
    assert len(re.findall(r'<div class="plot"', html)) == 3


def test_a_page_without_figures_carries_no_plotly() -> None:
    page = Page("t", "l")
    page.section("s").text("words")
    assert len(page.html()) < 50_000


def test_the_page_forbids_every_network_request_and_names_no_other_source() -> None:
    page = Page("t", "l")
    page.section("s").text("words")
    html = page.html()
    assert "default-src 'none'" in html
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", html)


def test_sections_of_one_title_get_different_anchors() -> None:
    page = Page("t", "l")
    first, second = page.section("Loss curves"), page.section("Loss curves")
    assert (first.anchor, second.anchor) == ("loss-curves", "loss-curves-2")
    assert f'href="#{second.anchor}"' in page.html()


def test_a_write_that_fails_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    page = Page("t", "l")
    monkeypatch.setattr(Page, "html", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.write(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_figures_take_their_colours_from_the_page_not_from_a_template() -> None:
    figure = json.loads(grouped_bars(["a"], {"part": [1.0]}, ["#2f7ed8"], "y", line_at=1.0).to_json())
    assert not figure["layout"].get("template")
