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
def test_page_has_a_finding_for_each_habit(
    text: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert len(list(prose.findings(tmp_path / "page.md"))) == count


def test_docstrings_comments_and_messages_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    source = (
        '"""A file that is no module."""\n\nx = 1  # beside the point\nraise ValueError(f"{x} is no valid number")\n'
    )
    (tmp_path / "code.py").write_text(source)
    assert sorted(finding.line for finding in prose.findings(tmp_path / "code.py")) == [1, 3, 4]
