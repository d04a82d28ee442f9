"""The machine that a process runs on: its cores and its device. Importing this does not import torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_device(name: str, setting: str = "device") -> torch.device:
    """`cpu`, `cuda`, or with `auto` a GPU if there is one; `setting` is what the person chose it with."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"{setting} is {name!r}: choose auto, cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        raise ValueError(f"{setting} is 'cuda' but PyTorch sees no GPU: choose auto or cpu.")
    return torch.device("cuda" if gpu and name != "cpu" else "cpu")
