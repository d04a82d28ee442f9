"""However a model is opened for generation, ExoFormer's static λ2 is in its weights; an export keeps it as trained."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import residua as library
from residua.export import export
from residua.generate.generator import Generator
from tests.trained import residua, train_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    attention = {"kind": "softmax", "heads": 2, "gate": "elementwise"}
    return train_run(tmp_path_factory.mktemp("folded"), attention=attention, anchors={"kind": "exoformer"})


@pytest.fixture
def generating(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that generators were built from."""
    models: list[nn.Module] = []
    make = Generator.__init__

    def note(self: Generator, model: nn.Module, *rest: object, **settings: object) -> None:
        models.append(model)
        make(self, model, *rest, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "__init__", note)
    return models


def scales(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "current_scale" in name]


def assert_folded(models: list[nn.Module]) -> None:
    assert len(models) == 1 and scales(models[0]) == []


def test_generate_folds_mixing_scales(run: Path, generating: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(scales(library.load(run))) == 8
    assert residua(monkeypatch, "generate", run, "--prompt", "depth is", "--tokens", 2) == 0
    assert_folded(generating)


def test_the_documented_python_works_and_folds_mixing_scales(run: Path, generating: list[nn.Module], capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code.replace("runs/tiny", str(run)), {})
    assert re.search(r" (length|end) [\d.]+\n$", capsys.readouterr().out)
    assert_folded(generating)


def test_the_harness_generates_with_folded_scales(
    run: Path, generating: list[nn.Module], tmp_path: Path, monkeypatch
) -> None:
    harness = pytest.importorskip("residua.evaluate.harness", exc_type=ImportError)
    monkeypatch.setattr(harness, "evaluate_with_harness", lambda *args, **settings: {})
    monkeypatch.setattr(harness, "TaskManager", lambda: SimpleNamespace(all_tasks=["arc_easy"], task_index={}))
    assert residua(monkeypatch, "eval", run, "--tasks", "arc_easy", "--out", tmp_path / "scores.json") == 0
    assert_folded(generating)


def test_the_decoding_benchmark_folds_mixing_scales(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from residua.bench import inference
    from residua.cli.bench import app

    models: list[nn.Module] = []
    make = inference.build_step
    monkeypatch.setattr(inference, "build_step", lambda model, *rest: (models.append(model), make(model, *rest))[1])
    settings = ["--compare", "base", "--batch", "1", "--filled", "4", "--rounds", "1", "--device", "cpu"]
    done = CliRunner().invoke(app, ["decode", str(run / "config.toml"), *settings])
    assert done.exit_code == 0, done.output
    assert_folded(models)


def test_an_export_keeps_unfolded_weights(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "exported")
    trained, read = (dict(library.load(folder).named_parameters()) for folder in (run, tmp_path / "exported"))
    assert trained.keys() == read.keys()
    assert all(torch.equal(trained[name], read[name]) for name in trained)
