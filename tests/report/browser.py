"""Opens pages in headless Chromium and notes everything that goes wrong: problems, requests, overflow, axe-core's view.

`opened` starts a browser for one page; `Browser` (and the fixture `browser` of a module) keeps one for many.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
PATIENCE = 600_000  # milliseconds; only a hanging page takes longer, even while other processes run
# Elements that stick out of the window and are not inside a box that scrolls by itself.
_OVERFLOWING = """() => {
  const room = document.documentElement.clientWidth;
  const inside = (element) => element.closest(".scroll, .strip, pre, nav, .plot, [hidden], details:not([open])");
  return [...document.querySelectorAll("body *")]
    .filter((element) => !inside(element.parentElement) && element.getBoundingClientRect().right > room + 0.5)
    .map((element) => `${element.localName}.${element.className}`)
    .concat(document.documentElement.scrollWidth > room ? ["the page scrolls sideways"] : []);
}"""

# Title, width of the plot and inner width of the card, of every figure that is shown.
_WIDTHS = """() => [...document.querySelectorAll(".plot .main-svg:first-of-type")]
  .filter((plot) => plot.checkVisibility())
  .map((plot) => {
    const card = plot.closest("figure"), style = getComputedStyle(card);
    const room = card.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    return [card.innerText.split("\\n")[0], Math.floor(plot.getBoundingClientRect().width), Math.ceil(room)];
  })"""


@dataclass
class Opened:
    """A page in the browser, with its errors and requests."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds, even on a busy machine."""
        while not self.page.evaluate(condition):  # `wait_for_function` is refused by the page's security policy
            self.page.wait_for_timeout(50)

    def resize(self, width: int, height: int = 900) -> None:
        """Change the window, and wait until every visible plot fits into it again."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.until(
            "[...document.querySelectorAll('.plot')].every(plot => !plot.querySelector('.main-svg') || "
            "plot.querySelector('.main-svg').getBoundingClientRect().width <= plot.clientWidth + 1)"
        )

    def overflowing(self) -> list[str]:
        """Elements that stick out of the window, apart from those inside scrolling boxes."""
        found: list[str] = self.page.evaluate(_OVERFLOWING)
        return found

    def outside_cards(self) -> list[tuple[str, int, int]]:
        """Visible plots that are wider than the card they are in: its title, the widths of the plot and of the card."""
        found: list[list[Any]] = self.page.evaluate(_WIDTHS)
        return [(title, plot, card) for title, plot, card in found if plot > card]

    def cut_tables(self) -> list[tuple[int, int]]:
        """Width needed and width there of the visible tables that do not fit their box."""
        boxes = "[...document.querySelectorAll('.scroll')].map(box => [box.scrollWidth, box.clientWidth])"
        return [(wide, room) for wide, room in self.page.evaluate(boxes) if wide > room]

    def violations(self) -> list[str]:
        """The findings of axe-core: rule and element. Skips the test where axe-core is not installed."""
        path = axe_core()
        self.page.evaluate(f"(() => {{ {path.read_text(encoding='utf-8')} }})()")
        rules = "axe.run({resultTypes: ['violations']})"  # of passed rules, one element each is described
        found = self.page.evaluate(f"{rules}.then(r => r.violations.flatMap(v => v.nodes.map(n => [v.id, n.html])))")
        return [f"{rule}: {element[:160]}" for rule, element in found]


def chromium() -> str:
    """The browser's path; the calling test skips where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    return found


def axe_core() -> Path:
    """axe-core's script; the calling test skips where it is not installed."""
    package = find_spec("axe_playwright_python")
    if package is None or package.origin is None:
        pytest.skip("axe-core is not installed (pip install axe-playwright-python)")
    return next(Path(package.origin).parent.rglob("axe.min.js"))


class Browser:
    """A running Chromium that opens one page after another."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser

    @contextmanager
    def opened(self, path: Path | str, width: int = 1280, **options: Any) -> Iterator[Opened]:
        """Load a file or an address and wait until its first plot is drawn; `color_scheme="dark"` opens it dark."""
        page = self._browser.new_page(viewport={"width": width, "height": 900}, **options)
        try:
            page.set_default_timeout(PATIENCE)
            seen = Opened(page)
            page.on("console", lambda m: seen.problems.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: seen.problems.append(str(error)))
            page.on("request", lambda request: seen.requests.append(request.url))
            page.goto(path if isinstance(path, str) else path.as_uri())
            page.wait_for_selector(".plot .main-svg", state="attached")
            yield seen
        finally:
            page.close()


@contextmanager
def running() -> Iterator[Browser]:
    """Chromium, for as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    executable = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS), timeout=PATIENCE)
        try:
            yield Browser(browser)
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for the tests of a module: `from tests.report.browser import browser`."""
    chromium()
    with running() as found:
        yield found


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Opened]:
    """Load a file in a separate browser and wait until its first plot is drawn."""
    with running() as found, found.opened(path, **options) as seen:
        yield seen
