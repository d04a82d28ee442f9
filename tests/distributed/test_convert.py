"""A run as single files: the conversion also keeps everything besides the last checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

import residua
from residua.config.run import RunConfig
from residua.distributed.convert import convert
from residua.integrations.torchtitan import convert as titan
from residua.storage.checkpoint import checkpoints
from residua.storage.hugging_face import stop_ids
from residua.train.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with checkpoints of steps 2 and 4, the first with the lower loss; begun from an imported model."""
    folder = tmp_path_factory.mktemp("convert") / "run"
    train(config.override(["train.steps=4", "train.save_every=2"]), folder, console=Console(quiet=True))
    first = checkpoints(folder)[0]
    (first.path / "state.json").write_text(json.dumps({**first.state, "validation_loss": 0.1}))
    (folder / "source").mkdir()
    (folder / "source" / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    return folder


def test_the_best_checkpoint_is_also_converted(run: Path, tmp_path: Path) -> None:
    assert convert(run, tmp_path / "files").name == "step-4"
    assert [c.step for c in checkpoints(tmp_path / "files")] == [2, 4]
    for which in ("last", "best"):
        models = [residua.load(folder, which) for folder in (run, tmp_path / "files")]
        assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_settings_of_an_imported_model_are_kept(run: Path, tmp_path: Path) -> None:
    convert(run, tmp_path / "files")
    titan.convert(run, tmp_path / "dump")
    titan.convert(tmp_path / "dump", tmp_path / "back")
    assert [stop_ids(tmp_path / name) for name in ("files", "dump", "back")] == [{3, 5}] * 3


def test_unreadable_best_checkpoint_is_reported_and_skipped(run: Path, tmp_path: Path, capsys) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    (copied / "checkpoints/step-2/model.safetensors").write_bytes(b"cut short")
    convert(copied, tmp_path / "files")
    assert [c.step for c in checkpoints(tmp_path / "files")] == [4]
    assert "only the last checkpoint is converted" in capsys.readouterr().err
