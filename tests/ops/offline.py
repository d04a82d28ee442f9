"""Compile every kernel that a set of cases launches, for sm_90 and without a GPU: finds what the interpreter cannot.

    PYTHONPATH=. python tests/ops/offline.py [wide] [sm_80|sm_89|sm_100|sm_120] [word …]

compiles the cases that CI compiles, or with `wide` all dtypes and sizes (an hour), of the operators whose names contain
one of the words. For GPUs other than sm_90 it leaves out what they leave to plain PyTorch.

The operators are called on CPU tensors as a model calls them, so the launchers take the same branches as on a GPU.
Triton is given an absent GPU as its target, and compiles each kernel without launching it. One line per kernel says
what it needs; the exit status is 1 if any does not compile or does not fit. TRITON_INTERPRET must not be set.
"""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import triton

from residua import ops
from residua.train.compile.precompile import AbsentGPU
from tests.ops.offline_cases import Case, small_cases, wide_cases

HOPPER = "sm_90"
MOST_SHARED = {"sm_80": 166_912, "sm_89": 101_376, HOPPER: 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Most bytes of shared memory per program."""
MULTIPROCESSORS = 132


class Kernels:
    """The compiled kernels: reports each once, with its resources."""

    def __init__(self, usage: bool) -> None:
        self.binaries, self.usage, self.began = set[bytes](), usage, time.perf_counter()

    def report(self, name: str, binary: bytes, shared: int) -> None:
        if binary not in self.binaries:
            self.binaries.add(binary)
            took, self.began = time.perf_counter() - self.began, time.perf_counter()
            print(f"  {name}: {took:.1f} s, {shared} B shared{spills(binary) if self.usage else ''}", flush=True)


def spills(binary: bytes) -> str:
    """Registers per thread, and bytes of stack, to which registers spill."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        made = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", made.stdout))
    return f", {found['REG']} registers, {found['STACK']} B of stack"


def compiled(cases: Iterable[Case], usage: bool, gpu: str = HOPPER) -> list[str]:
    """Compile the kernels of the cases; returns those that failed."""
    kernels = Kernels(usage)
    AbsentGPU(int(gpu.removeprefix("sm_")), MULTIPROCESSORS, MOST_SHARED[gpu], kernels.report).install()
    failed = []
    with ops.backend("triton"):
        for name, run in cases:
            print(name, flush=True)
            try:
                run()
            except Exception as error:  # the other kernels are tried, too
                failed.append(name)
                print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
    print(f"{len(kernels.binaries)} kernels, {len(failed)} cases failed: {', '.join(failed) or 'none'}", flush=True)
    return failed


def left_out(name: str, gpu: str) -> bool:
    """Whether a GPU leaves a case to plain PyTorch, as the declarations of the operators say."""
    hopper_only, much_shared = name.startswith("squared_relu"), name.startswith("symmetric_product")
    if name.startswith(("encode_", "fp8_")) and gpu == "sm_80":  # has no FP8
        return True
    return (hopper_only and gpu != HOPPER) or (much_shared and MOST_SHARED[gpu] < MOST_SHARED[HOPPER])


def main(arguments: list[str]) -> int:
    wide, gpu = "wide" in arguments, next((word for word in arguments if word in MOST_SHARED), HOPPER)
    words = [word for word in arguments if word not in ("wide", gpu)]
    cases = wide_cases() if wide else small_cases()
    chosen = (c for c in cases if not words or any(word in c[0] for word in words))
    return 1 if compiled((c for c in chosen if not left_out(c[0], gpu)), wide, gpu) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
