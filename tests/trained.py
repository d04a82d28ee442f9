"""A run folder small enough to train in a second, and verbs run in this process."""

import random
import sys
from pathlib import Path

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.data import open_corpus, prepare
from residua.train.trainer import train

WORDS = ["depth", "is", "how", "far", "the", "layers", "of", "a", "model", "talk", "to", "each", "other"]


def train_run(folder: Path, masking: str = "none", sequence: int | None = None, **model: object) -> Path:
    """Four steps of a model of bytes; its data lies beside it."""
    source = random.Random(0)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(" ".join(source.choices(WORDS, k=30)))
    prepare(open_corpus([texts], holdout=0.3), folder / "data", "bytes", workers=1)
    tables = {
        "vocab_size": 320, "context": 32, "layers": 2, "width": 16,
        "attention": {"kind": "softmax", "heads": 2}, "ffn": {"kind": "relu2", "hidden": 32},
    }  # fmt: skip
    recipe = {
        "steps": 4, "micro_batch": 4, "device": "cpu", "log_every": 4, "validate_every": 4, "save_every": 4,
        "schedule": {"kind": "cosine", "warmup": 1},
    }  # fmt: skip
    data = {"path": str(folder / "data"), "validation_tokens": 512, "masking": masking, "sequence": sequence}
    train(RunConfig(model=tables | model, data=data, train=recipe), folder / "run", console=Console(quiet=True))
    return folder / "run"


def residua(monkeypatch, *arguments: object) -> int:
    """Run a verb as the command line does; returns the exit status."""
    from residua.cli.main import main

    monkeypatch.setattr(sys, "argv", ["residua", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
