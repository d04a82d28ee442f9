"""The page in a real browser, from one model to sixteen, at three widths, light and dark."""

from pathlib import Path

import pytest

from residua.diagnose import Diagnosis
from residua.diagnose.page import diagnosis_page
from tests.diagnose import reports
from tests.report.browser import Browser, browser
from tests.report.looks import WIDTHS, check_looks

pytestmark = pytest.mark.slow
__all__ = ["browser"]

DIAGNOSES = {
    "one": lambda: reports.sick(),
    "healthy": lambda: reports.healthy(),
    "untrained": lambda: Diagnosis(models=[reports.report("random", 8, untrained=True, routing=True)]),
    "three": lambda: reports.side_by_side(3),
    "deep": lambda: Diagnosis(models=[reports.report("deep", 36, dead=[20], massive=[3], sinks=[3], routing=True)]),
    "sixteen": lambda: reports.side_by_side(16, layers=4),
}


_SIDES = """() => [...document.querySelectorAll(".rail:has(.zero)")].map((rail) => {
  const [bar, zero] = ["b", ".zero"].map((part) => rail.querySelector(part).getBoundingClientRect());
  return [bar.left - zero.left, bar.right - zero.left].map(Math.round);
})"""


def test_two_models_fit_a_phone_in_dark_mode(browser: Browser, tmp_path: Path) -> None:
    path = diagnosis_page(reports.side_by_side(2, layers=4)).write(tmp_path / "report.html")
    with browser.opened(path, width=420, color_scheme="dark") as seen:
        check_looks(seen, path)
        strips = seen.page.locator(".strip")
        assert strips.count() == 2
        assert strips.evaluate_all("all => all.every(strip => strip.scrollWidth <= strip.clientWidth)")
        colours = strips.evaluate_all(
            "all => all.map(s => getComputedStyle(s.querySelector('.rail b')).backgroundColor)"
        )
        assert len(set(colours)) == 2
        sides = seen.page.evaluate(_SIDES)  # where bars of removal begin and end, from the line at zero
        assert len(sides) == 8 and all(left == 0 or right == 0 for left, right in sides)
        assert sum(left < 0 for left, _ in sides) == 2
        for width in WIDTHS[:-1]:  # it was opened at the last one
            seen.resize(width)
            assert seen.outside_cards() == seen.overflowing() == []


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("models", DIAGNOSES)
def test_no_text_overflows_or_lacks_contrast(models: str, scheme: str, browser: Browser, tmp_path: Path) -> None:
    path = diagnosis_page(DIAGNOSES[models]()).write(tmp_path / "report.html")
    with browser.opened(path, width=WIDTHS[0], color_scheme=scheme) as seen:
        for width in WIDTHS:
            seen.resize(width)
            check_looks(seen, path)
            lines = seen.page.locator(".strips:not(.several) .zero")  # zero is at one place in all rows
            assert len(set(lines.evaluate_all("all => all.map(line => line.getBoundingClientRect().left)"))) <= 1
        assert len(seen.page.pdf()) > 10_000
        assert seen.page.locator(".plot:has(.main-svg)").count() == seen.page.locator(".plot").count()  # every tab
        assert seen.problems == []
