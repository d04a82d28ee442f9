"""Shared by tests of refusals: a command that must refuse, and its message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.trained import residua

Say = Callable[..., str]


@pytest.fixture
def say(monkeypatch, capsys, tmp_path: Path) -> Say:
    """The standard error of a command that must refuse. Nothing below the test's folder may change."""

    def files() -> dict[Path, bytes | str]:
        return {
            path: str(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else "a folder"
            for path in tmp_path.rglob("*")
            if path.name not in (".lock", "pipe")
        }

    def refused(*arguments: object) -> str:
        before = files()
        capsys.readouterr()
        code = residua(monkeypatch, *arguments)
        printed = capsys.readouterr().err
        assert code == 2 and files() == before, printed
        assert "Traceback" not in printed and "Errno" not in printed
        return printed

    return refused


@pytest.fixture
def sentence(say: Say) -> Say:
    """The same for a command that must print one line, without the name of the program."""

    def refused(*arguments: object) -> str:
        (line,) = say(*arguments).splitlines()
        assert line.startswith("residua: ")
        return line.removeprefix("residua: ")

    return refused
