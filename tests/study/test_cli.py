"""`residua compare` as a person meets it: help, lists, plans, and mistakes answered in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.cli.compare import app
from residua.data import Dataset
from residua.model.settings import ConfigError
from residua.study.variants import KNOWN

runner = CliRunner()


def test_help_shows_examples_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from residua.cli.compare import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: assert 'torch' not in sys.modules and 'plotly' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "residua compare --demo" in shown


def test_the_list_names_every_known_variant() -> None:
    shown = runner.invoke(app, ["--list"]).output
    assert all(name in shown for name in KNOWN)


def test_a_plan_says_what_matching_changes_and_trains_nothing(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "study"
    arguments = ["prenorm", "exoformer", "--base", "mini", "--seeds", "2", "--data", str(dataset.path), "--plan"]
    shown = runner.invoke(app, [*arguments, "--out", str(out)], catch_exceptions=False).output
    assert "2 variants × 2 seeds = 4 runs" in shown
    assert "FFN width 2048 → " in shown
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name two variants or more"),
        (["prenorm"], "name two variants or more"),
        (["prenorm", "mrg"], "did you mean 'mgr'"),
        (["prenorm", "mgr", "--match", "width"], r"match\.kind = 'width' does not exist"),
        (["prenorm", "mgr", "--base", "tinny"], "tiny"),
        (["prenorm", "mgr", "--tokens-per-parameter", "20"], "needs --sizes"),
        (["--demo", "mgr"], "--demo has its own variants"),
        (["missing.toml"], r"missing\.toml does not exist"),
        (["prenorm", "study.toml"], "a whole study"),
    ],
)
def test_a_mistake_is_answered_in_one_sentence(arguments: list[str], sentence: str, dataset: Dataset) -> None:
    given = arguments if "--demo" in arguments else [*arguments, "--data", str(dataset.path)]
    result = runner.invoke(app, [*given, "--plan"])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=sentence):
        raise result.exception


def test_options_go_over_a_study_file(dataset: Dataset, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "tiny"\nvariants = ["prenorm", "mgr"]\nseeds = 5\ndata = "{dataset.path}"\n')
    shown = runner.invoke(app, [str(file), "--seeds", "2", "--plan"], catch_exceptions=False).output
    assert "2 variants × 2 seeds = 4 runs" in shown
