"""The study's page in headless Chromium: plots there, no error, no request; tabs, themes, contents, paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from residua.data import Dataset
from residua.study import StudyConfig
from tests.report.browser import chromium, opened
from tests.study.test_results import laddered

SECTIONS = (
    "Verdict",
    "Equivalent tokens",
    "Loss curves",
    "Magnitude per sublayer",
    "Gradient per layer",
    "Depth weights",
    "Gate statistics",
    "Runs",
)


@pytest.fixture
def report(study: StudyConfig, dataset: Dataset, out: Path) -> Path:
    chromium()
    laddered(study, out, dataset, (0.5, 1, 1.5, 2))
    return out / "report.html"


@pytest.mark.slow
def test_the_study_page_opens_whole_offline_light_dark_and_on_paper(report: Path) -> None:
    with opened(report, color_scheme="light") as seen:
        page = seen.page
        titles = page.locator("main h2").all_inner_texts()
        assert [title for title in SECTIONS if title not in titles] == []

        plots, drawn = page.locator(".plot"), page.locator(".plot:has(.main-svg)")
        assert drawn.count() == page.locator(".plot:visible").count() >= 7
        page.click("[role=tab]:has-text('training, by seconds')")
        assert page.locator(".plot:visible:has(.main-svg)").count() == page.locator(".plot:visible").count()

        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light

        page.click("nav a:has-text('Runs')")
        seen.until("document.querySelector('#runs').getBoundingClientRect().top < 900")  # the page scrolls smoothly

        assert len(page.pdf()) > 10_000
        assert drawn.count() == plots.count()

        assert seen.problems == []
        assert seen.requests == [report.as_uri()]


@pytest.mark.slow
def test_no_column_is_cut_on_a_laptop_screen(report: Path) -> None:
    with opened(report) as seen:
        seen.page.set_viewport_size({"width": 1200, "height": 900})
        tables = seen.page.evaluate(
            "[...document.querySelectorAll('.scroll')].map(box => [box.scrollWidth, box.clientWidth])"
        )
        assert tables and all(wide <= room for wide, room in tables)
