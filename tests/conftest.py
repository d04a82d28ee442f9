"""Every test runs on one thread and from one seed; Triton kernels run in its interpreter unless told not to."""

import os

# Triton reads its switch when it is first imported, OpenMP when torch is: both before any other import.
# On a machine with a GPU, TRITON_INTERPRET=0 in the environment runs the real kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS reads this when it is first used, which may be long before the test that asks for equal bits
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Files whose tests are quick one by one and slow together: `make check` leaves them to `make test`.
SLOW_FILES = (
    "test_fused_",
    "test_compile",
    "test_combinations",
    "test_resume",
    "test_refusals",
    "test_runner",
    "test_huggingface",
    "test_planted",
    "test_ablations",
    "test_command",
    "test_matching",
    "test_presets",
    "test_decode.py",
    "test_rewrites_",
    "test_layers.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith(SLOW_FILES):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_configure(config: pytest.Config) -> None:
    # torch says so once on processors without bfloat16 instructions, with a page of C++ frames
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul")
