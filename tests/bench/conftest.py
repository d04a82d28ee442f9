"""Benchmarks collect garbage between cases: only what they made themselves, not what all tests have imported."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()
