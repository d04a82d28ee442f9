"""A run folder small enough to train in a second, and verbs run in this process."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from residua.config.run import RunConfig
from residua.data import Dataset, open_corpus, prepare
from residua.train.trainer import train

WORDS = ["depth", "is", "how", "far", "the", "layers", "of", "a", "model", "talk", "to", "each", "other"]


SMALL = {
    "vocab_size": 320, "context": 16, "layers": 2, "width": 16,
    "attention": {"kind": "softmax", "heads": 2}, "ffn": {"kind": "relu2", "hidden": 32},
}  # fmt: skip
"""A model that trains a step in a few milliseconds."""


def prepare_words(folder: Path, words: int = 30, holdout: float = 0.3, **settings: Any) -> Path:
    """A dataset of forty documents of so many words, one token per byte."""
    source, texts = random.Random(0), folder / "texts"
    texts.mkdir(parents=True)
    for number in range(40):
        (texts / f"{number}.txt").write_text(" ".join(source.choices(WORDS, k=words)))
    prepare(open_corpus([texts], holdout=holdout), folder / "data", "bytes", workers=1, **settings)
    return folder / "data"


def prepare_sentences(folder: Path, documents: int, holdout: float) -> Dataset:
    """Sentences of a few words over and over: learnable in a few steps, one token per byte."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
    for index in range(documents):
        lines = [" ".join(words[(index + i * j) % len(words)] for j in range(1, 8)) for i in range(60)]
        (folder / f"{index}.txt").write_text("\n".join(lines))
    return prepare(open_corpus([folder], holdout=holdout), folder / "prepared", "bytes")


def train_run(folder: Path, masking: str = "none", sequence: int | None = None, **model: object) -> Path:
    """Four steps of a model of bytes; its data is in a folder next to it."""
    prepare_words(folder)
    recipe = {
        "steps": 4, "micro_batch": 4, "device": "cpu", "log_every": 4, "validate_every": 4, "save_every": 4,
        "schedule": {"kind": "cosine", "warmup": 1},
    }  # fmt: skip
    data = {"path": str(folder / "data"), "validation_tokens": 512, "masking": masking, "sequence": sequence}
    train(
        RunConfig(model=SMALL | {"context": 32} | model, data=data, train=recipe),
        folder / "run",
        console=Console(quiet=True),
    )
    return folder / "run"


def residua(monkeypatch, *arguments: object) -> int:
    """Run a verb as the command line does; returns the exit status."""
    from residua.cli.main import main

    monkeypatch.setattr(sys, "argv", ["residua", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)
