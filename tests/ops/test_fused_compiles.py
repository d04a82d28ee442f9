"""Every kernel compiles for a GPU (sm_90). The interpreter runs Python, and accepts more than the compiler."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OFFLINE = Path(__file__).with_name("offline.py")


def compiler() -> Path | None:
    """The assembler of Triton's backend for NVIDIA, if this Triton has one."""
    spec = find_spec("triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/ptxas" if spec and spec.origin else None
    return tool if tool is not None and tool.exists() else None


@pytest.mark.timeout(3600)  # compiles some 150 kernels where Triton has not cached them
@pytest.mark.skipif(compiler() is None, reason="needs a Triton with its NVIDIA backend and ptxas")
def test_every_kernel_compiles_offline_for_a_gpu() -> None:
    # a fresh process: this one has replaced Triton's compiler by its interpreter
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, OFFLINE], env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    assert " 0 cases failed" in made.stdout
