"""Starts ranks as torchrun does, once for many cases, with an end to waiting."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(**more: Any) -> dict[str, str]:
    """This process's, on one thread, without what an outer launcher or pytest set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **{k: str(v) for k, v in more.items()}}


def start(ranks: int, module: str, *arguments: Any) -> list[subprocess.Popen[str]]:
    """`python -m module arguments` on so many ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT, env=environment(RANK=rank, LOCAL_RANK=rank, **job),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def launch(ranks: int, module: str, *arguments: Any, timeout: float = 120) -> None:
    """Run to the end; a rank that fails fails the test with what it said."""
    started = start(ranks, module, *arguments)
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [rank for rank, process in enumerate(started) if process.returncode != 0]
    assert not failed, f"ranks {failed} of {module} failed:\n" + "\n".join(outputs[rank][-3000:] for rank in failed)
