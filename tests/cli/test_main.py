"""The command line as a whole: verbs, help, and errors of one sentence."""

import io
import subprocess
import sys
import tomllib

import pytest
from rich.console import Console

from residua.cli.main import VERBS
from residua.cli.presets import print_table
from residua.config import presets
from residua.config.model import ModelConfig
from residua.model.size import measure
from residua.version import __version__
from tests.trained import residua

pytestmark = pytest.mark.slow  # imports every verb, and starts the command


def test_help_lists_every_verb(monkeypatch, capsys):
    assert residua(monkeypatch, "--help") == 0
    assert set(VERBS) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb, monkeypatch, capsys):
    assert residua(monkeypatch, verb, "--help") == 0
    assert f"residua {verb}" in capsys.readouterr().out


def test_a_preset_printed_as_toml_is_the_preset(monkeypatch, capsys):
    assert residua(monkeypatch, "presets", "exoformer-e-dynamic") == 0
    tables = tomllib.loads(capsys.readouterr().out)
    assert ModelConfig.from_dict(tables["model"]) == ModelConfig.preset("exoformer-e-dynamic")


def test_presets_are_listed_with_size_cost_and_summary(monkeypatch, capsys):
    assert residua(monkeypatch, "presets", "--matching", "mgr-s") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    (row,) = [line for line in lines if line.startswith("mgr-s-prenorm")]
    assert "123.6 M" in row and "0.80 G" in row and "pre-norm baseline" in row
    assert "12 × 768" in row and "10.5 G tokens in 20,000 steps, muon 0.01" in row


@pytest.mark.parametrize("width", ["70", "110", "150", "200"])
def test_the_list_of_presets_fits_the_terminal(width):
    shown = Console(width=int(width), file=io.StringIO())
    names = {"preset": "mgr-s-full", "parameters": "123.7 M", "for a token": "123.7 M", "FLOPs/token": "0.80 G"}
    words = {"layers × width": "12 × 768", "recipe": "10.5 G tokens in 20,000 steps, muon 0.01", "what": "word " * 15}
    print_table(shown, [{**names, **words}])
    lines = shown.file.getvalue().splitlines()
    assert max(map(len, lines)) <= int(width)
    assert lines[1].startswith("mgr-s-full") and "123.7 M" in lines[1] and "word word word" in lines[1]
    assert ("0.80 G" in lines[1]) == (width in ("150", "200"))


HEAVY = ("torch", "numpy", "scipy", "plotly", "transformers", "triton")
"""Modules that take seconds to import."""


AT_ONCE = [["--version"], ["--help"], ["presets"], ["presets", "tiny"], ["train", "--help"]]
AT_ONCE += [["compare", "--help"], ["completion"]]


def test_quick_commands_import_nothing_heavy():
    code = f"""
import os, sys
from residua.cli.main import main
for arguments in {AT_ONCE}:
    if arguments == ["completion"]:
        os.environ.update(_RESIDUA_COMPLETE="complete_bash", COMP_WORDS="residua ", COMP_CWORD="1")
    sys.argv = ["residua", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
    else:
        sys.exit(f"{{arguments}} did not end")
    if imported := [name for name in {HEAVY} if name in sys.modules]:
        sys.exit(f"{{arguments}} imported {{imported}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "completed"),
    [("ex", "export"), ("bench dec", "decode"), ("bench decode --ro", "--rounds"), ("train mini-mg", "mini-mgr")],
)
def test_the_shell_completes_verbs_options_and_presets(line, completed, monkeypatch, capsys):
    monkeypatch.setenv("_RESIDUA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"residua {line}")
    monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
    assert residua(monkeypatch) == 0
    assert completed in capsys.readouterr().out.split()


@pytest.mark.parametrize("start", [["-m", "residua"], ["-m", "residua.cli.main"]])
def test_version_is_printed_by_the_script_and_the_module(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"residua {__version__}\n")


@pytest.mark.parametrize("name", ["outlier-24b-a3b", "outlier-7b-a2b"])
def test_active_parameters_of_a_preset_exclude_the_embedding(name):
    size = measure(ModelConfig.preset(name))
    summary = presets.load(name)["summary"]
    assert f"{size.parameters / 1e9:.1f}B, {size.active / 1e9:.1f}B active beside the embedding" in summary
