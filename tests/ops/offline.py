"""Every launch of a set of cases, compiled for sm_90 instead of run: what the interpreter cannot see, without a GPU.

    PYTHONPATH=. python tests/ops/offline.py [wide] [word …]

compiles the cases that CI compiles, or with `wide` all dtypes and sizes (for an hour), of the operators whose name has
one of the words.

The operators are called on CPU tensors as a model calls them, so the launchers choose the branches they choose on a
GPU; Triton is told of a GPU that is not there, and compiles each kernel without starting it. One line per kernel says
what it takes; the exit status is 1 if any does not compile or would not fit. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from residua import ops
from residua.ops import fused
from residua.ops.depth_attention import launch
from tests.ops.offline_cases import Case, small_cases, wide_cases

MOST_SHARED = 232_448
"""Bytes of shared memory that a program may have on sm_90."""
MULTIPROCESSORS = 132


class Absent:
    """A GPU for which Triton compiles, and on which nothing runs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Stands in for `JITFunction.run`: compiles, and reports each kernel once."""

    def __init__(self, usage: bool) -> None:
        self.run, self.seen, self.usage = JITFunction.run, set[str](), usage

    def __call__(self, fn: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        began = time.perf_counter()
        kernel = self.run(fn, *args, grid=grid, warmup=True, **settings)
        if kernel.hash not in self.seen:
            self.seen.add(kernel.hash)
            took, shared = time.perf_counter() - began, kernel.metadata.shared
            print(f"  {fn.__name__}: {took:.1f} s, {shared} B shared{spills(kernel) if self.usage else ''}", flush=True)
            if shared > MOST_SHARED:
                raise RuntimeError(f"{fn.__name__} needs {shared} bytes of shared memory and sm_90 has {MOST_SHARED}")
        return kernel


def spills(kernel: Any) -> str:
    """Registers of a thread, and bytes of its stack, where what does not fit into them goes."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        made = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|STACK):(\d+)", made.stdout))
    return f", {found['REG']} registers, {found['STACK']} B of stack"


def compiled(cases: Iterable[Case], usage: bool) -> list[str]:
    """Compile what the cases launch; returns those that failed."""
    driver.set_active(Absent())
    compiler = Compiler(usage)
    JITFunction.run = lambda fn, *args, **settings: compiler(fn, *args, **settings)
    fused.serves = lambda *tensors: all(x.dtype in fused.DTYPES for x in tensors)
    fused.multiprocessors = lambda x: MULTIPROCESSORS
    launch._cores = lambda device: MULTIPROCESSORS
    failed = []
    with ops.backend("triton"):
        for name, run in cases:
            print(name, flush=True)
            try:
                run()
            except Exception as error:  # whatever it is, the other kernels are tried too
                failed.append(name)
                print(f"  FAILED: {type(error).__name__}: {error}", flush=True)
    print(f"{len(compiler.seen)} kernels, {len(failed)} cases failed: {', '.join(failed) or 'none'}", flush=True)
    return failed


def main(arguments: list[str]) -> int:
    wide, words = "wide" in arguments, [word for word in arguments if word != "wide"]
    cases = wide_cases() if wide else small_cases()
    chosen = (c for c in cases if not words or any(word in c[0] for word in words))
    return 1 if compiled(chosen, usage=wide) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
