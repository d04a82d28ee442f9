"""Opens pages in headless Chromium and notes everything that goes wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip
PATIENCE = 600_000  # milliseconds; only what hangs takes longer, also beside other processes


@dataclass
class Opened:
    """A page in the browser, and what it complained about or asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression holds, however busy the machine is."""
        while not self.page.evaluate(condition):  # `wait_for_function` is refused by the page's security policy
            self.page.wait_for_timeout(50)


def chromium() -> str:
    """The browser's path; the calling test skips where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if not found:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    return found


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Opened]:
    """Load a file and wait until its first plot is drawn."""
    from playwright.sync_api import sync_playwright

    executable = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS), timeout=PATIENCE)
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
            page.set_default_timeout(PATIENCE)
            seen = Opened(page)
            page.on("console", lambda m: seen.problems.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: seen.problems.append(str(error)))
            page.on("request", lambda request: seen.requests.append(request.url))
            page.goto(path.as_uri())
            page.wait_for_selector(".plot .main-svg", state="attached")
            yield seen
        finally:
            browser.close()
