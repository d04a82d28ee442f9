"""Checks that every page must pass in a browser."""

from itertools import pairwise
from pathlib import Path

from tests.report.browser import Opened

WIDTHS = (1400, 1100, 420)


def check_looks(seen: Opened, path: Path) -> None:
    """Nothing sticks out of the window or of its card, no table is cut at a desk, headings are in order, figures have
    words, axe-core is content."""
    assert seen.overflowing() == [] and seen.outside_cards() == []
    heads = "[...document.querySelectorAll('.strip thead th')].filter(h => h.scrollWidth > h.clientWidth)"
    assert seen.page.evaluate(f"{heads}.map(h => h.innerText)") == []
    assert seen.page.viewport_size["width"] < 1000 or seen.cut_tables() == []
    levels = seen.page.locator("h1, h2, h3, h4").evaluate_all("all => all.map(h => Number(h.localName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    words = seen.page.locator(".plot, .strip").evaluate_all("all => all.map(plot => plot.getAttribute('aria-label'))")
    assert all(words) and len(words) > 1
    assert seen.violations() == []
    assert seen.problems == []
    assert seen.requests == [path.as_uri()]
