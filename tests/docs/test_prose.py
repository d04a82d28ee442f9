"""`tools/prose.py` finds the habits it names and leaves plain sentences alone."""

from pathlib import Path

import pytest

from tools import prose

LONG = "word " * 31 + "."


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`--limit 0` is no length.", 1),
        ("It is no longer needed. There is no such file.", 0),
        ("What attention returns goes to the output map. A step beside tests.", 2),
        ("What is a topology? A module.", 0),
        (LONG, 1),
        ("| " + LONG + " |", 0),
        ("```\nthis is no length\n```\n\nPlain text.", 0),
    ],
)
def test_each_habit_in_a_page_is_a_finding(
    text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert len(list(prose.findings(tmp_path / "page.md"))) == count


def test_docstrings_comments_messages_and_test_names_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    source = (
        '"""A file that is no module."""\n\nx = 1  # beside the point\nraise ValueError(f"{x} is no valid number")\n'
        'def f():\n    """Add.\n\n    A row beside it.\n    """\n'
    )
    (tmp_path / "code.py").write_text(source)
    assert sorted(finding.line for finding in prose.findings(tmp_path / "code.py")) == [1, 3, 4, 6]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "code.py").write_text(f"{source}\n\ndef test_a_row_beside_it():\n    pass\n")
    assert sorted(finding.line for finding in prose.findings(tmp_path / "tests" / "code.py")) == [1, 3, 6, 12]


NAV = """nav:
  - Guides:
      - Train: train.md
      - Short: short.md
  - Reference:
      - Options: options.md
  - Internals:
      - tests.md
"""


def test_pages_and_guides_over_their_word_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "mkdocs.yml").write_text(f"site_name: Test\n\n{NAV}")
    (tmp_path / "docs").mkdir()
    words = {"train": 901, "short": 900, "options": 5_000, "tests": 1_500}
    for name, count in words.items():
        (tmp_path / "docs" / f"{name}.md").write_text("word " * count)
    assert [found.partition(" has")[0] for found in prose.long_pages()] == ["docs/train.md"]
    (tmp_path / "docs" / "tests.md").write_text("word " * 1_501)
    assert "docs/tests.md" in "".join(prose.long_pages())


def test_every_page_belongs_to_a_known_section() -> None:
    found = prose.sections()
    assert set(found.values()) == {"Learn", "Guides", "Reference", "Results", "Internals"}
    assert found["docs/train.md"] == "Guides" and found["docs/decisions/10-not-done.md"] == "Internals"
