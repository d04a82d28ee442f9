"""The documentation site: every page is on it, it builds without warnings, and it loads nothing from other hosts."""

import importlib
import mimetypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import residua
from tests.docs.commands import load_module

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
SITE = "http://site.test/"
API = (DOCS / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site():
    return load_module("tools/site.py")


def test_every_page_is_in_the_navigation(site) -> None:
    listed = re.findall(r"(\S+\.md)", NAV)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent.name != "lab"}
    assert len(listed) == len(set(listed)) and set(listed) == pages | set(site.BORROWED.values())


def test_the_reference_covers_the_public_api() -> None:
    shown = set(re.findall(r"^      heading: (\S+)", API, re.M))
    operators = ["depth_attention", "multi_gate", "gated_norm", "mix_projection", "linear_cross_entropy", "backend"]
    surface = {f"residua.{name}" for name in residua.__all__ if name not in ("ops", "choices")}  # modules
    assert surface | {f"residua.ops.{name}" for name in operators} <= shown
    for public in shown:
        place, _, name = public.rpartition(".")
        assert hasattr(importlib.import_module(place), name), public


def test_file_links_become_page_links(site) -> None:
    def relink(text: str, source: str = "README.md", page: str = "index.md") -> str:
        return site.relink(text, source, page)

    assert relink("[a](docs/train.md#x) ![b](docs/img/c.png)") == "[a](train.md#x) ![b](img/c.png)"
    assert relink("[why](docs/decisions/README.md), [how](CONTRIBUTING.md)") == (
        "[why](decisions/README.md), [how](contributing.md)"
    )
    assert relink("[p](../SECURITY.md)", "docs/security.md", "security.md") == "[p](security-policy.md)"
    assert relink("![p](../../docs/img/a.svg)", "docs/results/a.md", "results/a.md") == "![p](../img/a.svg)"
    assert relink("[x](https://example.org/a) [y](#b) [z](LICENSE)") == "[x](https://example.org/a) [y](#b) z"


def test_pipes_in_table_code_have_no_backslash(site) -> None:
    html = r"<td><code>a\|b\|c</code> and |h|</td><td><code>a|b</code></td>"
    assert site.on_page_content(html) == "<td><code>a|<wbr>b|<wbr>c</code> and |h|</td><td><code>a|b</code></td>"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the docs extra: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **nowhere}  # the build needs no network
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.nightly
def test_the_site_builds_without_warnings(built: Path) -> None:
    assert {"index.html", "quickstart.html", "api.html", "gallery.html"} <= {page.name for page in built.iterdir()}
    assert "residua.ops.depth_attention" in (built / "api.html").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_built_pages_load_nothing_from_other_hosts(built: Path) -> None:
    loading = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=["']?(?:https?:)?//""")
    assert [page.name for page in built.rglob("*.html") if loading.search(page.read_text(encoding="utf-8"))] == []


class Visit(NamedTuple):
    page: Any
    asked: list[str]
    errors: list[str]


@pytest.fixture
def visit(built: Path) -> Iterator[Visit]:
    """A browser for the site, which serves nothing else."""
    api = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no Chromium here: `make browser` installs it")
    asked, errors = [], []

    def serve(route) -> None:
        name = route.request.url.removeprefix(SITE).partition("?")[0]
        file = built / name
        asked.append(route.request.url)
        if file.is_file():
            kind = mimetypes.guess_type(file.name)[0] or "text/plain"
            route.fulfill(status=200, body=file.read_bytes(), content_type=kind)
        else:
            route.abort()

    with api.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        context = browser.new_context(color_scheme="dark", viewport={"width": 1400, "height": 900})
        context.route("**/*", serve)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield Visit(page, asked, errors)
        browser.close()


@pytest.mark.nightly
def test_site_works_in_a_browser_without_the_network(visit: Visit) -> None:
    page = visit.page
    for name in ("index.html", "topologies.html", "gallery.html"):
        page.goto(SITE + name)
        broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
        assert page.evaluate(broken) == []
    for name in ("index.html", "RESULTS.html", "results/main-mini.html"):  # their last columns matter most
        page.goto(SITE + name)
        page.wait_for_selector(".md-typeset__scrollwrap", state="attached")
        wraps = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
        assert page.evaluate(f"{wraps}.filter(w => w.scrollWidth > w.clientWidth).length") == 0, name
    page.click("input.md-search__input")
    page.keyboard.type("gates", delay=30)
    page.wait_for_selector(".md-search-result__item")
    assert visit.errors == [] and [url for url in visit.asked if not url.startswith(SITE)] == []


CUT = """() => {
  const found = [], wide = document.documentElement.clientWidth
  if (document.documentElement.scrollWidth > wide) found.push('the page')
  for (const code of document.querySelectorAll('.md-content pre > code')) {
    const edge = code.getBoundingClientRect().right - parseFloat(getComputedStyle(code).paddingRight) + 1
    const nodes = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), word = document.createRange()
    let under = false  // the copy button
    while (nodes.nextNode())
      for (const match of nodes.currentNode.data.matchAll(/\\S+/g)) {
        word.setStart(nodes.currentNode, match.index)
        word.setEnd(nodes.currentNode, match.index + match[0].length)
        under ||= [...word.getClientRects()].some(r => r.right > edge)
      }
    if (under || code.scrollWidth > code.clientWidth) found.push(code.innerText.slice(0, 40))
  }
  for (const image of document.querySelectorAll('.md-content img'))
    if (image.getBoundingClientRect().width < 600) found.push(image.src)
  return found
}"""


@pytest.mark.nightly
@pytest.mark.parametrize("width", [1400, 420])
def test_code_is_not_cut_off_and_pictures_are_not_tiny(visit: Visit, built: Path, width: int) -> None:
    visit.page.context.unroute_all()
    visit.page.set_viewport_size({"width": width, "height": 900})
    cut = {}
    for file in sorted(built.rglob("*.html")):  # from the folder, which is quicker than to serve every script again
        visit.page.goto(file.as_uri())
        cut[file.relative_to(built).as_posix()] = visit.page.evaluate(CUT)
    assert {name: found for name, found in cut.items() if found} == {}
