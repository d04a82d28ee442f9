"""Fixtures that several tests of this folder share."""

import json
import subprocess
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import say as say
from tests.cli.conftest import sentence as sentence

WITHHELD = ("residua", "__editable__", "pydantic", "typer", "tomli_w")


@pytest.fixture(scope="session")
def copied_code() -> None:
    """transformers copies the code of a folder it opens (into a folder of the tests' own: `tests/conftest.py`)."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def run_without_residua(tmp_path_factory) -> Callable[..., Any]:
    """Run a script with all packages installed here except Residua and packages that only Residua needs.

    Returns the last line that it prints, which is JSON.
    """
    home = tmp_path_factory.mktemp("alone")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    for entry in Path(spec.origin).parents[1].iterdir():
        if not entry.name.startswith(WITHHELD) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)

    def run(script: Path, *arguments: object, folder: Path) -> Any:
        command = [home / "bin" / "python", "-I", script, *arguments]
        environment = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
