"""The report of a quantization: its cost, the source of the error, and remedies."""

import json
import re
from html import unescape
from pathlib import Path

import pytest

from residua.quantize import result as sentences
from residua.quantize.page import quantization_page
from tests.quantize.reports import module, report
from tests.report.browser import Browser, browser
from tests.report.looks import WIDTHS, check_looks

__all__ = ["browser"]

REPORTS = {"small": (2, None), "outlier": (12, 4), "deep": (36, 20)}


def test_error_source_is_named_only_if_the_difference_is_clear() -> None:
    equal = sentences.blame(module("m", activations=0.1056, weights=0.1052))
    assert equal.startswith("from its activations (10.56% alone) and its weights (10.52% alone) about equally;")
    assert sentences.source(0.39, 0.105).startswith("mostly from its activations (39.00% alone, weights 10.50%)")
    assert sentences.source(0.1, 0.2).startswith("mostly from its weights (20.00% alone, activations 10.00%)")
    assert "equally" in sentences.source(0.124, 0.1) and "mostly" in sentences.source(0.126, 0.1)
    assert "equally" in sentences.source(0.0, 0.0)


def test_modules_are_named_by_layer_like_in_a_diagnosis() -> None:
    assert sentences.place("sublayers.8.body.project") == "layer 4 attention project"
    assert sentences.place("sublayers.9.body.up") == "layer 4 feed-forward up"
    assert sentences.place("anchors.project") == "anchors.project"


def test_first_screen_states_cost_cause_and_remedy() -> None:
    html = unescape(quantization_page(report(12, cost=0.21, outlier_layer=4)).html())
    assert "<title>nvfp4 costs 0.2100 nats per token</title>" in html and '<header data-tone="bad">' in html
    cards = re.findall(r'<article class="card is-(\w+)"><h3>.*?</span>([^<>]+)</h3>(.*?)</article>', html)
    assert [(tone, title) for tone, title, _ in cards] == [
        ("bad", "What it costs"), ("bad", "Where the error comes from"), ("note", "What helps")
    ]  # fmt: skip
    assert "<dt>Stands out</dt><dd>layer 4 attention project</dd>" in cards[1][2]
    assert "--exempt 'sublayers.8.body.project'" in cards[2][2] and "--smooth 0.5" in cards[2][2]


def test_only_outlier_modules_are_red() -> None:
    html = quantization_page(report(12, cost=0.21, outlier_layer=4)).html()
    (row,) = re.findall(r'<tr><th scope="row">([^<]+)</th><td class="is-bad"', html)
    assert row == "layer 4" and html.count('<td class="is-bad"') == 1
    healthy = quantization_page(report(12)).html()
    assert 'class="is-bad"' not in healthy and 'class="card is-bad"' not in healthy
    assert "No module: none has 2 times the error of the median module" in unescape(healthy)


def test_a_cost_under_a_thousandth_of_a_nat_is_called_nothing() -> None:
    titles = {cost: quantization_page(report(2, cost=cost)).title for cost in (0.0004, -0.02, 0.05)}
    assert titles == {
        0.0004: "nvfp4 costs this model nothing",
        -0.02: "nvfp4 costs this model nothing: the loss falls by 0.0200 nats",
        0.05: "nvfp4 costs 0.0500 nats per token",
    }


def test_measured_remedies_precede_untested_ones() -> None:
    dear = report(4, cost=0.2, outlier_layer=1)
    assert sentences.helps(dear)[0].startswith("Leaving sublayers.2.body.project in high precision gains 0.1200 nats")
    assert all(line.startswith("Not tried: ") for line in sentences.helps(dear)[1:])
    smoothed = dear.model_copy(update={"alpha": 0.5, "unsmoothed": ("sublayers.2.body.project",)})
    assert any("--inside" in line for line in sentences.helps(smoothed))
    assert not any("--smooth" in line for line in sentences.helps(smoothed))
    none = "None of the 3 worst modules gains 0.001 nats or more when exempt."
    assert sentences.helps(report(4, cost=0.0001)) == [none]


def test_labels_are_readable_at_36_layers() -> None:
    html = quantization_page(report(36)).html()
    assert re.findall(r'<th scope="row">(layer \d+)</th>', html) == [f"layer {n}" for n in reversed(range(36))]
    plots = [json.loads(plot) for plot in re.findall(r'<script type="application/json">(.*?)</script>', html)]
    assert all(36 / plot["layout"]["xaxis"]["dtick"] <= 18 for plot in plots) and len(plots) == 3
    assert {trace["name"] for trace in plots[0]["data"]} == {
        "attention project", "attention out", "feed-forward up", "feed-forward out"
    }  # fmt: skip


def test_modules_outside_the_layers_have_their_own_rows() -> None:
    result = report(2)
    html = quantization_page(result.model_copy(update={"modules": (*result.modules, module("anchors.project"))})).html()
    assert re.findall(r'<th scope="row">(.*?)</th>', html)[:3] == ["layer 1", "layer 0", "anchors.project"]


@pytest.mark.slow
def test_the_page_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    path = quantization_page(report(6, cost=0.06, outlier_layer=2)).write(tmp_path / "report.html")
    with browser.opened(path, width=420) as seen:
        check_looks(seen, path)
        assert seen.page.locator(".strip").evaluate("strip => strip.scrollWidth <= strip.clientWidth")


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_no_text_overflows_or_lacks_contrast(name: str, scheme: str, browser: Browser, tmp_path: Path) -> None:
    layers, outlier = REPORTS[name]
    path = quantization_page(report(layers, cost=0.06, outlier_layer=outlier)).write(tmp_path / "report.html")
    with browser.opened(path, width=WIDTHS[0], color_scheme=scheme) as seen:
        for width in WIDTHS:
            seen.resize(width)
            check_looks(seen, path)
        assert len(seen.page.pdf()) > 10_000 and seen.problems == []
