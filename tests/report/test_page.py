"""The page builder: escaped text, one copy of plotly.js, no network, and distinguishable colours."""

import gzip
import hashlib
import json
import math
import re
from itertools import combinations
from pathlib import Path

import pytest

from residua.report import Card, Column, Link, Page, Picture, Series, Sorted, Value, page, theme
from residua.report.figures import Curve, Estimate, curves, forest, grouped_bars, heatmap
from residua.report.section import legend, words

EVIL = '<script>alert("x")</script>&\'</b>'


def one_of_everything(text: str) -> Page:
    page = Page(text, text, "good")
    page.made({text: text})
    section = page.section(text, text)
    section.text(text)
    section.verdict(text, "bad")
    section.note(text)
    section.cards([Card(text, text, {text: text})])
    with section.fold(text):
        section.text(text)
    section.code(text)
    section.subheading(text)
    section.points([text])
    section.facts({text: text, "link": Link(text, f"runs/{text}")})
    section.table([Column(text, text), Column("b")], [[Value(text, text), Link(text, "#x")]])
    section.table([Column(text, numeric=False)], [[Series(text, "#2f7ed8", text)]], order=Sorted(0))
    section.beside(Picture(forest([Estimate(text, 1.0, "#2f7ed8", (0.5, 1.5), text)], text), text, text))
    line = curves([Curve(text, [0, 1], [1.0, 2.0], "#2f7ed8")], text, text)
    section.figure(line, text)
    section.tabs({text: line, "other": heatmap([[1.0, None]], [text, "2"], [text], text, text, text)}, text)
    return page


def test_text_passed_by_callers_is_escaped() -> None:
    html = one_of_everything(EVIL).html()
    assert EVIL not in html
    # The text between our own scripts contains no foreign element.
    assert "<script>alert" not in html and "</b>" not in re.sub(r"<script.*?</script>", "", html, flags=re.S)


def test_plotly_is_embedded_once_for_any_number_of_figures() -> None:
    html = one_of_everything("x").html()
    assert html.count(page.plotly_script()) == 1
    assert len(re.findall(r'<div class="plot"', html)) == 4


def test_plotly_is_the_published_file_and_small_enough_to_email() -> None:
    unpacked = gzip.decompress(page.packed_plotly())
    assert hashlib.sha256(unpacked).hexdigest() == page.PLOTLY_SHA256
    assert f"v{page.PLOTLY_VERSION}".encode() in unpacked[:200]
    assert len(one_of_everything("x").html()) < 800_000


def test_a_page_without_figures_has_no_plotly() -> None:
    page = Page("t", "l")
    page.section("s").text("words")
    assert len(page.html()) < 50_000


def test_page_forbids_network_and_references_no_other_source() -> None:
    page = Page("t", "l")
    page.section("s").text("words")
    html = page.html()
    assert "default-src 'none'" in html
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", html)


def test_sections_with_equal_titles_get_different_anchors() -> None:
    page = Page("t", "l")
    first, second = page.section("Loss curves"), page.section("Loss curves")
    assert (first.anchor, second.anchor) == ("loss-curves", "loss-curves-2")
    assert f'href="#{second.anchor}"' in page.html()


def test_a_failed_write_keeps_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    page = Page("t", "l")
    monkeypatch.setattr(Page, "html", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.write(target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_figures_use_the_colours_of_the_page() -> None:
    figure = json.loads(grouped_bars(["a"], {"part": [1.0]}, ["#2f7ed8"], "y", line_at=1.0).to_json())
    assert not figure["layout"].get("template")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def oklab(colour: str) -> tuple[float, float, float]:
    """Björn Ottosson's OKLab, in which distances are nearly those that people see."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    long = math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b)
    medium = math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b)
    short = math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_sixteen_series_have_colours_that_differ_visibly() -> None:
    colours = [theme.colour(place) for place in range(16)]
    assert len(set(colours)) == 16
    assert min(math.dist(oklab(a), oklab(b)) for a, b in combinations(colours, 2)) > 0.085


def test_a_hundred_series_all_look_different() -> None:
    assert len({(theme.colour(place), theme.symbol(place)) for place in range(100)}) == 100


@pytest.mark.parametrize("name", ["light", "dark", "paper"])
def test_series_and_text_contrast_with_the_panel(name: str) -> None:
    paper = theme._PAPER[name]
    assert min(contrast(theme.colour(place), paper["panel"]) for place in range(16)) >= 2.99  # WCAG: 3 for graphics
    assert contrast(paper["ink"], paper["panel"]) >= 4.5


@pytest.mark.parametrize("name", ["light", "dark"])
def test_a_cell_near_zero_does_not_look_like_a_missing_one(name: str) -> None:
    panel, scales = oklab(theme._PAPER[name]["panel"]), (theme._SEQUENTIAL[name][0], theme._DIVERGING[name][3])
    assert min(math.dist(oklab(stop), panel) for stop in scales) > 0.06


def test_a_figure_has_a_text_description() -> None:
    line = curves([Curve("a", [0, 10], [3.0, 1.5], "#2f7ed8")], "tokens", "loss & more")
    assert words(line) == "Plot of loss & more by tokens. a: from 3 at 0 to 1.5 at 10."
    bars = grouped_bars(["x"], {"p": [1.0], "q": [None]}, ["#2f7ed8", "#000000"], "nats")
    assert words(bars) == "Bars of nats. p: x 1."
    heat = heatmap([[0.1, None], [0.2, 0.7]], ["0", "1"], ["1", "head"], "source", "reader", "weight")
    assert words(heat) == (
        "Heat map of weight: 2 rows, reader, and 2 columns, source. From 0.1 to 0.7, the largest at reader head and "
        "source 1."
    )


def test_a_legend_names_each_series_once() -> None:
    series = [Curve(name, [0, 1], [1.0, 2.0], "#2f7ed8", low=[0, 1], high=[2, 3], markers=True) for name in ("a", "b")]
    shown = legend(curves([*series, Curve("a", [0], [1.0], "#2f7ed8", legend=False)], "x", "y"))
    assert re.findall(r'data-series="(.)"', shown) == ["a", "b"]
    assert legend(curves(series[:1], "x", "y")) == ""


def test_an_estimate_without_an_interval_is_hollow() -> None:
    figure = forest([Estimate("a", 0.0, "#2f7ed8", (-0.9, math.inf)), Estimate("b", -0.1, "#d9641c")], "x")
    line, a, b = figure.data
    assert (
        -0.5 < line.x[0] < -0.2 and 0.0 < line.x[1] < 0.5 and line.marker.symbol == ("triangle-left", "triangle-right")
    )
    assert (a.marker.symbol, b.marker.symbol) == ("circle", "circle-open")
