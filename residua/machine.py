"""The machine that a process runs on: its cores, its device, the processes it starts. Does not import torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_command(*arguments: str) -> list[str]:
    """A command for this Python that does not import from the working folder; use it with `python_environment`."""
    return [sys.executable, "-P", *arguments]


def python_environment(**changes: str) -> dict[str, str]:
    """The environment of a Python process that imports from where this one does, and its own children likewise.

    Without it, a process begun with -m or -c takes a `random.py` or a folder `residua` from the working folder.
    """
    package = str(Path(__file__).parents[1])
    places = dict.fromkeys([*filter(os.path.isabs, sys.path), package])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1", **changes}


def choose_device(name: str, setting: str = "device") -> torch.device:
    """`cpu`, `cuda`, or with `auto` a GPU if there is one; `setting` is what the person chose it with."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{setting} is {name!r}: choose auto, cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        raise ValueError(f"{setting} is 'cuda' but PyTorch sees no GPU: choose auto or cpu.")
    return torch.device("cuda" if gpu and name != "cpu" else "cpu")
