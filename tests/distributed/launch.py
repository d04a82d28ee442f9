"""Starts ranks as torchrun does, once for many cases, with an end to waiting."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def environment(**more: Any) -> dict[str, str]:
    """This process's, on one thread, without what an outer launcher or pytest set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **{k: str(v) for k, v in more.items()}}


def torchrun(ranks: int, *arguments: Any, timeout: float = 150, **more: Any) -> subprocess.CompletedProcess[str]:
    """The command itself, which starts `python -m …` anew for every rank; `more` is for the environment."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment(**more), capture_output=True, text=True, timeout=timeout
    )


@dataclass
class Rank:
    """A started rank, whose output goes to a file."""

    process: ForkServerProcess
    output: Path

    def wait(self, until: float) -> str:
        """What it said when it ended, which is before `until` or not at all."""
        self.process.join(max(0.0, until - time.monotonic()))
        assert self.process.exitcode is not None, f"still running: {self.said()}"
        return self.said()

    def said(self) -> str:
        return self.output.read_text()


def start(ranks: int, module: str, *arguments: Any) -> list[Rank]:
    """`module.main(*arguments)` on so many ranks, forked from one process that has imported it all already."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["tests.distributed.worker", "tests.distributed.train_run"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = _outputs() / str(port)
    folder.mkdir()
    started = []
    for rank in range(ranks):
        job = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        output = folder / str(rank)
        process = forked.Process(target=_run, args=(environment(**job), output, module, arguments), daemon=True)
        process.start()
        started.append(Rank(process, output))
    return started


@cache
def _outputs() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def _run(variables: dict[str, str], output: Path, module: str, arguments: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    import_module(module).main(*arguments)


def launch(ranks: int, module: str, *arguments: Any, timeout: float = 120, again: bool = False) -> None:
    """Run to the end; a rank that fails fails the test with what it said.

    `again`: start once more if a rank dies by a segmentation fault, which was seen once in a thread of gloo's own
    (`pt_gloo_runloop`), in a process that makes many groups one after the other.
    """
    started, until = start(ranks, module, *arguments), time.monotonic() + timeout
    try:
        outputs = [rank.wait(until) for rank in started]
    finally:
        for rank in started:
            rank.process.kill()
    failed = [number for number, rank in enumerate(started) if rank.process.exitcode != 0]
    if again and any(started[number].process.exitcode == -signal.SIGSEGV for number in failed):
        warnings.warn(f"a rank of {module} died by a segmentation fault: all are started once more", stacklevel=2)
        return launch(ranks, module, *arguments, timeout=timeout)
    assert not failed, f"ranks {failed} of {module} failed:\n" + "\n".join(outputs[i][-3000:] for i in failed)
