"""A process that trains a run and is killed with SIGKILL during the run's second save, for tests."""

import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from residua.config.run import RunConfig
from residua.storage import tensors
from residua.train.trainer import train

OWNERS: dict[str, tuple[Any, int]] = {"save_file": (tensors, 4), "rename": (pathlib.Path, 2)}
"""The owner of the function that does not return, and the number of that call."""


def main(source: pathlib.Path, out: pathlib.Path, where: str) -> None:
    torch.set_num_threads(1)
    owner, last = OWNERS[where]
    setattr(owner, where, _deadly(getattr(owner, where), last, half_written=where == "save_file"))
    train(RunConfig.from_toml(source), out, console=Console(quiet=True))


def _deadly(original: Callable[..., Any], last: int, half_written: bool) -> Callable[..., Any]:
    calls = 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last:
            if half_written:
                pathlib.Path(arguments[1]).write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    return call
