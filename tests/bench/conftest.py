"""Benchmarks collect garbage between cases: only their own objects, not those of all imports."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

MODEL = """
[model]
vocab_size = 64
context = 16
layers = 2
width = 16
attention = { kind = "softmax", heads = 2 }
ffn = { kind = "relu2", hidden = 32 }
"""
RECIPE = """
[train]
steps = 12
micro_batch = 2
accumulate = 2
device = "cpu"
schedule = { kind = "cosine", warmup = 2 }
"""


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The file of a tiny model."""
    path = tmp_path / "tiny.toml"
    path.write_text(MODEL)
    return path
