"""The environment of a run: version and commit of the code, Python, libraries and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from residua.version import MATHEMATICS, __version__

TEXT = "text"
"""Key of the text's fingerprint in a run's environment."""
START = "start"
"""Key of the initial weights' fingerprint (`train.start`) in a run's environment."""
CPUINFO = Path("/proc/cpuinfo")


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Software and hardware of this process, as plain JSON."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    described: dict[str, Any] = {
        "residua": __version__,
        "mathematics": MATHEMATICS,
        "commit": code_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "platform": platform.platform(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return described


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the threads in use; speeds under the same name are comparable."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@cache
def code_commit() -> str | None:
    """The git commit that this package runs from, with `+changes` if the tree differs; None outside a checkout.

    Computed once per process, because a process keeps running the code it has loaded even if the tree changes.
    """
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{commit}+changes" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of git, or None. Git is run read-only: plain `git status` would lock the index for other commands."""
    command, variables = ["git", *arguments], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """Name and number of cores; if Linux gives no name, as on ARM, the implementer and part numbers."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names, makers, parts = (
        [line.partition(":")[2].strip() for line in lines if line.startswith(key)]
        for key in ("model name", "CPU implementer", "CPU part")
    )
    if names:
        return f"{names[0]} x {len(names)}"
    if parts and len(makers) == len(parts):
        kinds = dict.fromkeys(f"implementer {m}, part {p}" for m, p in zip(makers, parts, strict=True))
        return f"{platform.machine()} ({'; '.join(kinds)}) x {len(parts)}"
    return platform.processor() or platform.machine()
