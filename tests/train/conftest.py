"""A dataset of a few kilobytes and a run small enough to train in well under a second."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from residua.config.run import RunConfig
from residua.data import open_corpus, prepare

WORDS = ["depth", "is", "how", "far", "the", "layers", "of", "a", "model", "talk", "to", "each", "other"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared dataset, one token per byte."""
    folder = tmp_path_factory.mktemp("text")
    source = random.Random(0)
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(source.choices(WORDS, k=60)))
    out = folder / "dataset"
    prepare(open_corpus([folder], holdout=0.2), out, "bytes", workers=1)
    return out


@pytest.fixture(scope="session")
def config(data: Path) -> RunConfig:
    return small_run(data)


def small_run(data: Path) -> RunConfig:
    """Six steps on two micro-batches each, a checkpoint every two."""
    return RunConfig(
        model={
            "vocab_size": 320,
            "context": 16,
            "layers": 2,
            "width": 16,
            "attention": {"kind": "softmax", "heads": 2},
            "ffn": {"kind": "relu2", "hidden": 32},
        },
        data={"path": str(data), "validation_tokens": 128},
        train={
            "steps": 6,
            "micro_batch": 2,
            "accumulate": 2,
            "schedule": {"kind": "cosine", "warmup": 2},
            "device": "cpu",
            "log_every": 2,
            "validate_every": 3,
            "save_every": 2,
            "telemetry": "off",
        },
    )
