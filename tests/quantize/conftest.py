"""A model trained for a few steps, with an outlier planted in it, to be quantized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from residua.config.run import RunConfig
from residua.data import Dataset
from residua.train.trainer import train
from tests.trained import prepare_sentences

OUTLIER = 5
"""The input channel that the planted run's norms let through far above the others."""


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepare_sentences(tmp_path_factory.mktemp("text"), documents=12, holdout=0.2)


def run_config(dataset: Dataset, *changes: str) -> RunConfig:
    small = [
        f"data.path={str(dataset.path)!r}".replace("'", '"'),
        "model.vocab_size=257", "model.layers=2", "model.width=32", "model.attention.heads=2", "model.context=32",
        "model.ffn.hidden=64", "train.device=cpu", "train.steps=40", "train.micro_batch=8", "train.schedule.warmup=4",
        "train.log_every=40", "train.validate_every=40", "train.save_every=40", "data.validation_tokens=1024",
    ]  # fmt: skip
    return RunConfig.find("tiny").override([*small, *changes])


@pytest.fixture(scope="session")
def run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MGR with GatedNorm and gated attention: a depth operator, gates and a norm that reads its own output."""
    out = tmp_path_factory.mktemp("runs") / "run"
    changes = ("model.norm.kind=gatednorm", "model.attention.gate=elementwise", "model.topology.kind=multi_gate")
    train(run_config(dataset, *changes, "model.topology.streams=2"), out, console=Console(quiet=True))
    return out


@pytest.fixture(scope="session")
def planted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same function with channel `OUTLIER` of every norm 300 times larger and its columns smaller."""
    import shutil

    out = tmp_path_factory.mktemp("planted") / "run"
    shutil.copytree(run, out)
    path = next((out / "checkpoints").glob("step-*")) / "model.safetensors"
    tensors = load_file(path)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if ".norm.weight" in name and name.startswith("sublayers"):
                tensor[OUTLIER] *= 300
            if name.endswith((".norm.gate.down", ".body.project.weight", ".body.up.weight")):
                tensor[:, OUTLIER] /= 300
    save_file(tensors, path)
    return out


def quiet_transformers() -> Any:
    """The library without its progress bars; the calling test skips where it is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()
    return transformers
