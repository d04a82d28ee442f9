"""`residua export` at the command line, and other verbs on its folder."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import residua as library
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow
BLOCK = {"kind": "block_attnres", "sublayers_per_block": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train_run(tmp_path_factory.mktemp("export"), topology=BLOCK)


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    from residua.export import export

    made = export(run, run.parent / "exported", "best")
    assert made.difference is None or made.difference < 1e-5
    return made.folder


def test_the_folder_is_written_checked_and_printed(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert residua(monkeypatch, "export", run, "--out", out, "--precision", "bfloat16") == 0
    words = capsys.readouterr().out
    assert re.search(r"[\d,]+ parameters in bfloat16, \d+ files of modelling code", words)
    assert re.search(r"Its own code was run: logits differ from the model's by \d\.\de-\d\d", words)
    assert "residua generate" in words and "trust_remote_code=True" in words
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_export_without_transformers_is_written_but_untested(
    run: Path, exported: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("modeling", "configuration"):
        monkeypatch.delitem(sys.modules, f"residua.export.{name}", raising=False)
    out = tmp_path / "out"
    assert residua(monkeypatch, "export", run, "--out", out) == 0
    assert (
        "The exported code was not tested: install transformers (residua[hf]) to check it." in capsys.readouterr().out
    )
    assert code_of(out) == code_of(exported)


def code_of(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.glob("*.py")}


def test_generate_gives_the_same_text_from_run_and_export(run: Path, exported: Path, monkeypatch, capsys) -> None:
    said = []
    for folder in (run, exported):
        assert residua(monkeypatch, "generate", folder, "--prompt", "depth is", "--tokens", 8, "--temperature", 0) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]


def test_diagnose_gives_the_same_for_an_export_and_its_run(run: Path, exported: Path, tmp_path: Path) -> None:
    from residua.diagnose import diagnose

    text = tmp_path / "text.txt"
    text.write_text("depth is how far the layers of a model talk " * 20)
    settings = {"text": text, "tokens": 64, "length": 16, "ablations": "none", "device": "cpu"}
    first, second = (diagnose([f], tmp_path / f.name, **settings).models[0] for f in (run, exported))
    assert second.loss == first.loss
    assert (
        second.depth_weights and second.depth_weights == first.depth_weights
    )  # the routing, which only Residua's own taps show


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere", "--out", "{tmp}/out"), "nowhere is not a folder"),
        (("{run}", "--out", "{run}"), "exists and is not an empty folder: choose another --out."),
        (("{run}", "--out", "{tmp}/out", "--checkpoint", "first"), "--checkpoint first does not exist"),
        (("{run}", "--out", "{tmp}/out", "--precision", "float8"), "precision float8 does not exist"),
    ],
)
def test_mistakes_print_one_sentence_and_leave_nothing(
    arguments: tuple[str, ...], words: str, run: Path, tmp_path: Path, sentence
) -> None:
    before = sorted(run.rglob("*"))
    assert words in sentence("export", *(a.format(run=run, tmp=tmp_path) for a in arguments))
    assert sorted(run.rglob("*")) == before


def test_export_whose_code_disagrees_is_never_published(run: Path, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("transformers")
    from residua.export import export, folder

    honest = folder.bundle
    right, wrong = "relu(linear(x, w_in)).square()", "relu(linear(x, w_in))"

    def changed(*given: Any) -> dict[str, str]:
        files = honest(*given)
        assert right in files["residua_ops_squared_relu.py"] and "residua_ops_delta_rule.py" not in files
        return {name: text.replace(right, wrong) for name, text in files.items()}

    monkeypatch.setattr(folder, "bundle", changed)
    with pytest.raises(RuntimeError, match="differs from the model"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_documented_python_runs(exported: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("transformers")
    request.getfixturevalue("copied_code")
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks
    scope: dict = {}
    for code in blocks:
        exec(code.replace("exported/tiny", str(exported)), scope)
    assert isinstance(scope["decoder"], library.Decoder)
