"""The README: its links hold in the repository and on PyPI, and its picture is that of the measured table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def _module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_relative_link_is_a_file_of_the_repository() -> None:
    relative = [target for _, target in LINK.findall(README) if not target.startswith("https://")]
    assert len(relative) > 20
    assert [target for target in relative if not (ROOT / target.partition("#")[0]).exists()] == []


def test_on_pypi_every_link_is_absolute_and_leads_to_that_file() -> None:
    text = _module("setup.py").absolute(README, "https://example.org/us/residua", "v1")
    pairs = list(zip(LINK.findall(README), LINK.findall(text), strict=True))
    for (mark, before), (_, after) in pairs:
        assert after.startswith("https://")
        if not before.startswith("https://"):
            assert after == f"https://example.org/us/residua/{'raw' if mark else 'blob'}/v1/{before}"
    assert any(mark for (mark, _), _ in pairs)


def test_a_build_knows_its_repository_on_github_only(monkeypatch) -> None:
    setup = _module("setup.py")
    for name, value in (("SERVER_URL", "https://example.org"), ("REPOSITORY", "us/residua"), ("SHA", "abc")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert setup.repository() == ("https://example.org/us/residua", "abc")
    monkeypatch.delenv("GITHUB_REPOSITORY")
    assert setup.repository() is None


def test_every_interval_is_in_a_table_that_is_made_from_a_study() -> None:
    """So that a study that goes on does not leave old numbers in the sentences about it."""
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "results").glob("*.md")]
    made = "".join(block for page in pages for block in re.findall(r"<!-- study .*?<!-- end -->", page, re.S))
    words = README + re.sub(r"<!-- study .*?<!-- end -->", "", (ROOT / "docs" / "RESULTS.md").read_text(), flags=re.S)
    told = re.findall(r"(\d\.\d\d×)(?: per\s+second)?\s+(\[[^]]*\d\])", words)
    assert len(told) > 5
    wanted = [f" {gain} {' '.join(ends.split())}" for gain, ends in told]
    assert [words for words in wanted if f"{words} |" not in made and f"{words}." not in made] == []


def test_the_picture_is_drawn_from_the_measured_study() -> None:
    answer = _module("tools/answer.py")
    found = answer.measured()
    assert {row.size for row in found} == {"124 M", "51 M"} and [row.change for row in found] == sorted(
        row.change for row in found
    )
    assert answer.PICTURE.read_text(encoding="utf-8") == answer.draw(found), "run `make results`"
    assert "docs/img/answer.svg" in README


def test_the_picture_says_what_the_numbers_say() -> None:
    answer = _module("tools/answer.py")
    paying = [
        answer.Row(name, -0.2, -0.3, -0.1, 1.2, 1.1, 1.3, 1.1, gain, True)
        for name, gain in {"A": 1.1, "B": 1.2, "C": 1.05}.items()
    ]
    unsure = answer.Row("D", -0.1, -0.3, 0.1, 1.3, 0.8, 1.6, 1.1, 1.18, False)
    lower = answer.Row("E", -0.2, -0.3, -0.1, 1.2, 1.1, 1.3, 1.5, 0.8, False)
    assert answer._answer([*paying, unsure]) == "Faster per second: B 1.20×, A 1.10×, and 1 more."
    smaller = paying[1]._replace(gain=1.15, size="51 M")
    assert answer._answer([smaller, *paying]) == "Faster per second: B 1.20×, A 1.10×, and 1 more."
    assert answer._answer([paying[0], unsure]) == "Faster per second: A 1.10×."
    assert answer._answer([lower, unsure]) == "Lower loss per step: E. Faster per second: none in this study."
    assert answer._answer([unsure]) == "No lower loss was shown. Faster per second: none in this study."
