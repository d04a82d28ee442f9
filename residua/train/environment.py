"""What a run was trained with: version and commit of the code, Python, libraries, hardware."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from residua.version import MATHEMATICS, __version__


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Software and hardware of this process, as plain JSON."""
    described: dict[str, Any] = {
        "residua": __version__,
        "mathematics": MATHEMATICS,
        "commit": code_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
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
    """The GPU's name, or the processor's with the threads in use: speeds with the same name can be compared."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).name)
    return f"{_processor() or platform.machine()}, {torch.get_num_threads()} threads"


def code_commit() -> str | None:
    """The git commit this package runs from, with `+changes` where the tree differs; None outside a checkout."""
    package = Path(__file__).parents[1]
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git(package, "rev-parse", "HEAD")
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{commit}+changes" if commit and changed else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor()
