"""The live page in a browser: it grows with the files, fits every window, and asks only its own server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, browser  # noqa: F401
from tests.watch.runs import EVIL, lines, write_many, write_result, write_run, write_study
from tests.watch.test_server import serving

pytestmark = pytest.mark.slow

VARIANTS = {"prenorm": 0.0, "block_attnres": 0.1, "mgr": 0.2, EVIL.replace("/", ""): 0.25}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_study(tmp_path_factory.mktemp("watched") / "study", VARIANTS)


def points(plot: str) -> str:
    return f"document.getElementById('live-{plot}').data.reduce((sum, line) => sum + line.x.length, 0)"


def test_the_page_grows_while_a_run_does(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    run = write_run(tmp_path / "run", 100)
    with serving(run) as server, browser.opened(server.url) as seen:
        seen.until("document.title === 'run is training'")
        seen.until("document.querySelector('main').innerText.includes('step 100 of 1,000')")
        before = seen.page.evaluate(points("loss"))
        more = lines(260, 101)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(more[:-9])  # the last line is incomplete
        seen.until("document.querySelector('main').innerText.includes('step 250 of 1,000')")
        seen.until(f"{points('loss')} === {before} + 2 * 15")  # smoothed and not
        with (run / "metrics.jsonl").open("a") as file:
            file.write(more[-9:])
        seen.until("document.querySelector('main').innerText.includes('step 260 of 1,000')")
        new = tmp_path / "new"
        new.write_text(lines(1000, gain=0.1, experts=True))
        new.replace(run / "metrics.jsonl")
        write_result(run, 1000)
        seen.until("document.title === 'run has finished'")
        seen.until("!document.getElementById('live-heaviest').closest('figure').hidden")
        run.rename(tmp_path / "elsewhere")
        seen.until("document.querySelector('main').innerText.includes('its folder was removed')")
        assert seen.page.evaluate(points("validation")) == 20
        for name, unit in (("tokens", 1000 * 4096), ("time", 1000 * 0.031 * 1.1 / 60), ("steps", 1000)):
            seen.page.click(f".axis button:text-is('{name}')")
            last = seen.page.evaluate("document.getElementById('live-loss').data[0].x.at(-1)")
            assert last == pytest.approx(unit, rel=1e-3)
        assert seen.problems == []
        assert all(url.startswith(server.url) for url in seen.requests)


@pytest.mark.nightly
def test_the_page_fits_every_window_in_light_and_dark(browser: Browser, study: Path) -> None:  # noqa: F811
    with serving(study) as server, browser.opened(server.url) as seen:
        seen.until("document.querySelectorAll('tbody tr').length === 8")
        papers = set()
        for scheme in ("light", "dark"):
            seen.page.emulate_media(color_scheme=scheme)
            papers.add(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            for width in (1400, 1100, 420):
                seen.resize(width)
                assert seen.overflowing() == [], (scheme, width)
                if width > 1000:
                    assert seen.cut_tables() == []
            assert seen.violations() == []
        assert len(papers) == 2
        assert seen.page.evaluate("document.querySelectorAll('main img').length") == 0
        assert EVIL.replace("/", "") in seen.page.inner_text("tbody")
        assert seen.problems == []
        assert all(url.startswith(server.url) for url in seen.requests)


DRAWN = "document.getElementById('live-loss').querySelector('.main-svg') !== null"
ROWS = "[...document.querySelectorAll('tbody th')].map(name => name.innerText)"


def test_charts_of_finished_runs_are_inside_their_cards(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    """A card that is shown after the first chart is drawn takes half of its row."""
    runs = [write_run(tmp_path / name, 300, 300, finished=True) for name in "ab"]
    for width in (1400, 1100):
        with serving(*runs, interval=1.0) as server, browser.opened(server.url, width) as seen:
            seen.until(DRAWN)
            assert seen.page.locator("figure:visible").count() == 7
            assert seen.outside_cards() == [] and seen.overflowing() == [], width
            if width == 1100:
                seen.resize(420)
                assert seen.outside_cards() == [] and seen.overflowing() == []


def test_24_runs_can_be_sorted_chosen_and_hidden(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    names = [f"width-{64 * number}-anchors" for number in range(1, 25)]
    with serving(write_many(tmp_path / "runs"), interval=1.0) as server, browser.opened(server.url, 1400) as seen:
        seen.until(DRAWN)
        assert seen.outside_cards() == [] and seen.overflowing() == [] and seen.cut_tables() == []
        assert seen.page.title() == "runs: 2 training, 18 of 24 finished, 4 crashed"
        looks = "document.getElementById('live-loss').data.map(line => line.line.color + line.line.dash)"
        assert len(set(seen.page.evaluate(looks))) == 24
        seen.page.click(".legend button:text-is('width-64-anchors')")
        assert len(seen.page.evaluate(looks)) == 23
        seen.page.click("th button:text-is('run')")
        assert seen.page.evaluate(ROWS) == names
        seen.page.click("th button:text-is('validation loss')")
        asked = len(seen.requests)
        seen.until(f"{asked} < performance.getEntriesByType('resource').length")
        assert seen.page.evaluate(ROWS)[0] == names[-1], "the order outlasts the next answer"
        seen.page.click("text=crashed 4")
        rows = seen.page.locator("tbody tr").all_inner_texts()
        assert len(rows) == 4 and all("RuntimeError: mat1 and mat2 differ in layer" in row for row in rows)
        assert len(seen.page.evaluate(looks)) == seen.page.locator(".happened > li").count() == 4
        seen.page.fill("input[type=search]", "-320")
        assert seen.page.evaluate(ROWS) == ["width-320-anchors"]
        assert seen.page.inner_text("[role=status]:visible") == "1 of 24 runs"
        assert seen.problems == []


def test_page_keeps_its_curves_after_the_server_ends(browser: Browser, tmp_path: Path) -> None:  # noqa: F811
    with serving(write_run(tmp_path / "run", 100)) as server:
        opened = browser.opened(server.url)
        seen = opened.__enter__()
        seen.until("document.title === 'run is training'")
    seen.until("document.querySelector('.lost').innerText.includes('residua watch has ended')")
    assert seen.page.evaluate(points("loss")) > 10
    opened.__exit__(None, None, None)
