"""The study's page in headless Chromium: it shows the answer first, fits, and is accessible; tabs, themes, print."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.report.browser import Browser, Opened, browser  # noqa: F401 (a fixture)
from tests.study.pretend import NAMES, pretended

pytestmark = pytest.mark.slow
SECTIONS = [
    "Verdict", "Equivalent tokens", "Loss curves", "Low precision", "Magnitude per sublayer", "Gradient per layer",
    "Depth weights", "Gate statistics", "Runs", "How this was made",
]  # fmt: skip
Report = Callable[[int], Path]
WIDTHS, SCHEMES = (1400, 1100, 420), ("light", "dark")
# The colours that the figures on the page give to each series.
COLOURS = """() => {
  const found = {};
  for (const plot of document.querySelectorAll(".plot")) {
    const figure = plot.figure || JSON.parse(plot.querySelector("script").textContent);
    for (const trace of figure.data) {
      const colour = trace.marker?.color || trace.line?.color;
      if (typeof colour === "string" && trace.meta) (found[trace.meta.series] ||= new Set()).add(colour);
    }
  }
  return Object.fromEntries(Object.entries(found).map(([name, colours]) => [name, [...colours]]));
}"""
# The titles of axes that reach out of their figures.
CUT = """() => [...document.querySelectorAll(".plot:has(.main-svg)")].flatMap(plot => {
  const frame = plot.querySelector(".main-svg").getBoundingClientRect();
  const outside = box => box.left < frame.left || box.right > frame.right || box.bottom > frame.bottom;
  const titles = [...plot.querySelectorAll(".xtitle, .ytitle")];
  return titles.filter(title => outside(title.getBoundingClientRect())).map(title => title.textContent);
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The page of a study with so many variants, made once."""
    folder = tmp_path_factory.mktemp("studies")
    return cache(lambda variants: pretended(variants).page(folder).write(folder / f"{variants}.html"))


@pytest.fixture(scope="module")
def seen(report: Report, browser: Browser) -> Iterator[Opened]:  # noqa: F811
    """The page of sixteen variants in light mode, open for several tests."""
    with browser.opened(report(16), 1400, color_scheme="light") as opened:
        yield opened


def check(seen: Opened, width: int, path: Path) -> None:
    """No overflow, no cut table on a desktop, no error, no request, no accessibility problem."""
    assert seen.overflowing() == []
    assert width < 1000 or seen.cut_tables() == []
    assert seen.violations() == []
    assert seen.problems == []
    assert seen.requests == [path.as_uri()]


def test_the_title_states_the_answer_and_the_footer_its_origin(seen: Opened) -> None:
    assert seen.page.inner_text("h1") == "Yes: the best of 15, block_attnres, is about 1.06× per second"
    assert seen.page.locator("main h2").all_inner_texts() == SECTIONS
    foot = seen.page.inner_text("footer")
    for fact in ("2026-11-02", "NVIDIA H200", "PyTorch 2.13.0", "0123456789ab", "32.77 M tokens", "residua compare"):
        assert fact in foot
    shown = "rect => rect.bottom > 0 && rect.bottom <= innerHeight"
    first = "[...document.querySelectorAll('.beside .plot')].map(p => p.getBoundingClientRect())"
    assert seen.page.evaluate(f"{first}.every({shown})"), "both pictures are on the first screen"


def test_sixteen_variants_have_sixteen_colours(seen: Opened) -> None:
    found = {name: colours for name, colours in seen.page.evaluate(COLOURS).items() if name in NAMES}
    assert list(found) and set(found) == set(NAMES)
    assert all(len(colours) == 1 for colours in found.values()), found
    assert len({colours[0] for colours in found.values()}) == 16


def test_every_visible_figure_is_drawn_and_described(seen: Opened) -> None:
    page = seen.page
    page.click("[role=tab]:has-text('training, by seconds')")
    assert page.locator(".plot:visible:has(.main-svg)").count() == page.locator(".plot:visible").count() >= 8
    words = page.evaluate("[...document.querySelectorAll('.plot')].map(plot => plot.getAttribute('aria-label'))")
    assert all(len(label) > 40 for label in words)
    assert "block_attnres: -0.0450, interval -0.0570 to -0.0330" in words[0]
    page.click("[role=tab]:has-text('difference to prenorm')")


def test_a_column_is_sorted_with_the_keyboard(seen: Opened) -> None:
    table = seen.page.locator("table").first
    rows = table.locator("tbody tr")
    names = [rows.nth(i).get_attribute("data-series") for i in range(3)]
    assert names == ["block_attnres", "mgr", "prenorm"]  # by wall-clock gain, the baseline at 1
    head = table.locator("th", has_text="parameters")
    head.locator("button").focus()
    seen.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending" and rows.first.get_attribute("data-series") == "resformer"
    seen.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending" and rows.first.get_attribute("data-series") == "prenorm"
    assert table.locator("th[aria-sort]").count() == 1


def test_hovering_over_a_variant_highlights_it_everywhere(seen: Opened) -> None:
    page = seen.page
    page.locator("table tr[data-series=mgr8]").first.hover()
    faint = "[...document.querySelectorAll('.plot:has(.main-svg)')].filter(p => p.querySelector('.faint')).length"
    assert page.evaluate(faint) >= 4
    assert page.locator(".legend button.seen").count() == page.locator(".legend button[data-series=mgr8]").count() > 0
    page.locator("h1").hover()
    assert page.locator(".faint, .seen").count() == 0


def test_clicking_a_legend_entry_hides_and_shows_its_curve(seen: Opened) -> None:
    plot = seen.page.locator("#loss-curves [role=tabpanel]:visible")
    lines = plot.locator("g.trace.scatter")
    before = lines.count()
    for state, count in (("false", before - 1), ("true", before)):
        plot.locator(".legend button[data-series=mgr]").click()
        assert plot.locator(".legend button[data-series=mgr]").get_attribute("aria-pressed") == state
        assert lines.count() == count


def test_the_page_fits_desktop_laptop_and_phone(seen: Opened, report: Report) -> None:
    for width in WIDTHS:  # the last test of this page: it stays narrow
        if width != 1400:
            seen.resize(width)
        assert seen.overflowing() == []
        assert width < 1000 or seen.cut_tables() == []
    assert seen.problems == []
    assert seen.requests == [report(16).as_uri()]


def test_the_page_works_in_dark_mode_on_a_phone_and_in_print(report: Report, browser: Browser) -> None:  # noqa: F811
    with browser.opened(report(3), 420, color_scheme="dark") as seen:
        page = seen.page
        check(seen, 420, report(3))
        seen.resize(390)
        assert page.evaluate(CUT) == []
        style = "(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
        dark = page.evaluate(style)
        page.click("#theme")
        assert page.evaluate(style) != dark
        page.click("nav a:has-text('Runs')")
        seen.until("document.querySelector('#runs').getBoundingClientRect().top < 900")  # the page scrolls smoothly

        page.click("#theme")
        assert page.evaluate(style) == dark
        page.emulate_media(media="print")
        assert page.evaluate(style) == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]
        assert seen.problems == []


@pytest.mark.nightly
def test_every_view_and_collapsed_section_is_printed(report: Report, browser: Browser) -> None:  # noqa: F811
    with browser.opened(report(3), 420) as seen:
        assert len(seen.page.pdf()) > 10_000
        assert seen.page.locator(".plot:has(.main-svg)").count() == seen.page.locator(".plot").count()
        assert seen.problems == []


@pytest.mark.nightly
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("variants", [3, 12, 16])
def test_every_page_fits_every_width_in_light_and_dark(
    variants: int, scheme: str, width: int, report: Report, browser: Browser  # noqa: F811
) -> None:  # fmt: skip
    with browser.opened(report(variants), width, color_scheme=scheme) as seen:
        check(seen, width, report(variants))
        for summary in seen.page.locator("summary").all():
            summary.click()
        check(seen, width, report(variants))
        found = {name: colours for name, colours in seen.page.evaluate(COLOURS).items() if name in NAMES}
        assert len({colour for colours in found.values() for colour in colours}) == len(found) == variants
