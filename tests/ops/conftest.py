"""Tests of operators run on poisoned memory, those of fused ones where Triton is installed."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_fused_*.py"]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Fill uninitialised memory with NaN, so that an output that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
