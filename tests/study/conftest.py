"""A small study on a small text, planned but not trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from residua.data import Dataset, open_corpus, prepare
from residua.study import StudyConfig


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Sentences of a few words over and over: learnable in a few steps, one token per byte."""
    folder = tmp_path_factory.mktemp("text")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
    for index in range(20):
        lines = [" ".join(words[(index + i * j) % len(words)] for j in range(1, 8)) for i in range(60)]
        (folder / f"{index}.txt").write_text("\n".join(lines))
    return prepare(open_corpus([folder], holdout=0.2), folder / "prepared", "bytes")


@pytest.fixture(scope="session")
def study() -> StudyConfig:
    """Pre-norm against three others, two seeds, ten steps."""
    return StudyConfig(
        name="small",
        base="tiny",
        variants=["prenorm", "block_attnres", "mgr", "exoformer"],
        seeds=2,
        set=SMALL,
    )


SMALL = (
    "model.width=32",
    "model.attention.heads=2",
    "model.ffn.hidden=128",
    "model.context=32",
    "train.device=cpu",
    "train.steps=10",
    "train.micro_batch=2",
    "train.schedule.warmup=2",
    "train.log_every=1",
    "train.validate_every=5",
    "train.save_every=5",
    "data.validation_tokens=256",
)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "study"
