"""The page in a real browser: plots drawn, nothing wrong, nothing asked of the network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from residua.diagnose import Diagnosis
from residua.diagnose.page import diagnosis_page
from tests.diagnose import planted
from tests.report.browser import chromium, opened

pytestmark = pytest.mark.slow

SECTIONS = (
    "Summary",
    "What removal costs",
    "Attention sinks",
    "Attention entropy",
    "Residual sinks",
    "Massive activations",
    "Magnitude per sublayer",
    "Gradient per sublayer",
    "Token and layer similarity",
    "Depth weights",
    "Streams",
    "Attention gates",
    "Anchor mixing",
    "How this was made",
)


def everything() -> Diagnosis:
    """Models that together have every section."""
    gated = {"kind": "softmax", "heads": 4, "gate": "elementwise", "sink": "learned"}
    tables = (
        {"topology": {"kind": "full_attnres"}},
        {"topology": {"kind": "multi_gate", "streams": 3}},
        {"attention": gated, "anchors": {"kind": "exoformer"}},
    )
    made = [planted.diagnosed(planted.control(**t), ablations="all", ablation_tokens=32) for t in tables]
    return Diagnosis(models=[m.model_copy(update={"name": f"<b>{i}</b>"}) for i, m in enumerate(made)])


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return everything()


def test_every_section_says_what_healthy_looks_like(diagnosis: Diagnosis) -> None:
    html = diagnosis_page(diagnosis).html()
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", html)
    assert titles == list(SECTIONS)
    for part in html.split("<section ")[1:-1]:
        assert "ealthy" in re.sub(r"<script.*?</script>", "", part, flags=re.S)
    assert "<b>0</b>" not in html


def test_a_plain_model_has_no_empty_sections() -> None:
    html = diagnosis_page(Diagnosis(models=[planted.diagnosed(planted.control(), ablations="none")])).html()
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", html)
    assert not {"Depth weights", "Streams", "Attention gates", "Anchor mixing", "What removal costs"} & set(titles)


@pytest.mark.slow
def test_the_page_opens_offline_without_complaint(diagnosis: Diagnosis, tmp_path: Path) -> None:
    chromium()
    path = diagnosis_page(diagnosis).write(tmp_path / "report.html")
    with opened(path, color_scheme="light") as seen:
        page = seen.page
        assert seen.requests == [path.as_uri()]
        assert page.locator("nav a").count() == len(SECTIONS)
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.locator("nav a", has_text="Depth weights").click()
        page.locator("#depth-weights .plot .main-svg").first.wait_for(state="attached")
        # the page scrolls smoothly
        seen.until("Math.abs(document.querySelector('#depth-weights').getBoundingClientRect().top) < 200")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")
        page.emulate_media(color_scheme="dark")
        seen.until(f"getComputedStyle(document.body).backgroundColor != '{light}'")
        assert len(page.pdf()) > 10_000
        assert page.locator(".plot:has(.main-svg)").count() == page.locator(".plot").count()  # on paper, every tab
        assert seen.problems == []
