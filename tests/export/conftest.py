"""What several tests of this folder share."""

import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

WITHHELD = ("residua", "__editable__", "pydantic", "typer", "tomli_w")


@pytest.fixture(scope="session")
def copied_code() -> None:
    """transformers copies the code of a folder it opens (into a folder of the tests' own: `tests/conftest.py`)."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def python_without_residua(tmp_path_factory) -> Path:
    """A fresh interpreter that finds all that is installed here, but not Residua and what it alone needs."""
    home = tmp_path_factory.mktemp("alone")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for entry in Path(spec.origin).parents[1].iterdir():
        if not entry.name.startswith(WITHHELD) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    return home / "bin" / "python"
