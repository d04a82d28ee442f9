"""Check the machine and its packages: which are installed, too old or missing, and how to install them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from residua.doctor.findings import Finding, in_words, quiet
from residua.errors import UserError
from residua.machine import available_cores, free_memory, short_bytes
from residua.version import __version__

PURPOSES = {
    "triton": "fused kernels on a GPU",
    "data": "Hugging Face datasets, Parquet and zstd files",
    "track": "TensorBoard and Weights & Biases",
    "hf": "models of transformers",
    "eval": "lm-evaluation-harness",
    "quant": "quantized folders for vLLM",
    "titan": "training with torchtitan",
    "linear": "a peer of the delta rule in residua bench ops",
}
DEVELOPERS = ("dev", "docs")
"""Extras for people who work on Residua."""
_MODULES = {"lm-eval": "lm_eval", "flash-linear-attention": "fla", "compressed-tensors": "compressed_tensors"}
_NEEDS_GPU = frozenset({"fla"})  # imports fail without a GPU
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?\s*(?:(>=|==)\s*([\w.]+))?\s*(?:;(.*))?$")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([\w-]+)[\"']")
_SYSTEM = re.compile(r"platform_system\s*==\s*[\"'](\w+)[\"']")


@dataclass(frozen=True)
class Requirement:
    """A package that Residua or one of its extras needs; `system` is the only platform it exists for.

    `relation` says how a working version compares with `least`: >= or ==.
    """

    name: str
    least: str = ""
    extra: str = ""
    system: str = ""
    relation: str = ">="

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Parse package metadata such as `triton>=3.6; platform_system == "Linux" and extra == "triton"`."""
        match = _REQUIREMENT.match(text.strip())
        if match is None:
            raise UserError(f"the requirement {text!r} cannot be read: write it as name>=version; marker.")
        marker = match[4] or ""
        extra, system = _EXTRA.search(marker), _SYSTEM.search(marker)
        names = extra[1] if extra else "", system[1] if system else ""
        return cls(match[1], match[3] or "", *names, match[2] or ">=")

    @property
    def module(self) -> str:
        """The module to import."""
        return _MODULES.get(self.name, self.name.replace("-", "_"))

    @property
    def command(self) -> str:
        """The command that installs it."""
        return f"pip install 'residua[{self.extra}]'" if self.extra else f"pip install '{self.wanted}'"

    @property
    def wanted(self) -> str:
        return f"{self.name}{self.relation}{self.least}" if self.least else self.name


def machine() -> Iterator[Finding]:
    """Residua, Python, the processor and its memory."""
    yield Finding("this machine", "residua", "ok", f"{__version__} in {Path(__file__).parents[1]}")
    yield Finding("this machine", "python", "ok", f"{platform.python_version()} in {sys.prefix}")
    yield Finding("this machine", "system", "ok", f"{platform.platform()}, {platform.machine()}")
    free = free_memory()
    memory = "" if free is None else f", {short_bytes(free)} of memory free"
    yield Finding("this machine", "processor", "ok", f"{available_cores()} cores{memory}")


def accelerator() -> Iterator[Finding]:
    """PyTorch's device, and the tools needed to compile for it."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            size = short_bytes(about.total_memory)
            words = f"{about.name}, {size}, compute capability {about.major}.{about.minor}, CUDA {torch.version.cuda}"
            yield Finding("device", f"GPU {index}", "ok", words)
        yield from _compiler()
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        words = f"there is a GPU, but PyTorch {torch.__version__} does not use it"
        yield Finding("device", "GPU", "note", words, "install a PyTorch for your CUDA: pytorch.org/get-started")
    else:
        yield Finding("device", "GPU", "missing", "none: everything runs on the CPU, without kernels")


def _compiler() -> Iterator[Finding]:
    """A C compiler, with which Triton builds a small C program for every kernel it launches."""
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "gcc", "clang", "cc")), None)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if compiler is None:
        words = "none, but Triton needs one to launch its kernels"
        yield Finding("device", "C compiler", "failed", words, "apt-get install gcc")
    elif not header.exists():
        words = f"{compiler}, but {header} is missing"
        yield Finding("device", "C compiler", "failed", words, "apt-get install python3-dev")
    else:
        yield Finding("device", "C compiler", "ok", compiler)


def requirements() -> list[Requirement]:
    """The requirements of the installed package, with all extras except the developer ones."""
    try:
        texts = metadata.requires("residua") or []
    except metadata.PackageNotFoundError:
        return []
    parsed = [Requirement.parse(text) for text in texts]
    return [need for need in parsed if need.extra not in DEVELOPERS and need.name != "residua"]


def packages(needs: Sequence[Requirement], imported: bool = True) -> Iterator[Finding]:
    """One row per package. With `imported`, also import it to see whether it works, which takes some seconds."""
    if not needs:
        words = "runs from a folder, without its list of requirements"
        yield Finding("packages", "residua", "note", words, "pip install -e . in its folder")
    for need in needs:
        if need.system in ("", platform.system()):
            yield _package(need, import_module if imported else find_spec)


def _package(need: Requirement, look: Callable[[str], object]) -> Finding:
    purpose = f", for {PURPOSES.get(need.extra, need.extra)}" if need.extra else ""
    group = "extras" if need.extra else "packages"
    try:
        version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
        state = "missing" if need.extra else "failed"
        return Finding(group, need.name, state, f"not installed{purpose}", need.command)  # type: ignore[arg-type]
    if need.least and _numbers(version) < _numbers(need.least):
        return Finding(group, need.name, "failed", f"{version} is too old{purpose}", f"pip install -U '{need.wanted}'")
    if need.relation == "==" and version != need.least:
        words = f"{version} is installed, but Residua needs {need.least}{purpose}"
        return Finding(group, need.name, "note", words, f"pip install '{need.wanted}'")
    problem = "" if need.module in _NEEDS_GPU else _import_problem(need.module, look)
    if problem:
        words = f"{version} is installed, but does not work: {problem}"
        return Finding(group, need.name, "failed", words, f"pip install --force-reinstall '{need.wanted}'")
    return Finding(group, need.name, "ok", f"{version}{purpose}")


def _import_problem(module: str, look: Callable[[str], object]) -> str:
    """Why a package cannot be imported; empty if it can. A third-party package may raise anything."""
    try:
        with quiet():
            spec = look(module)
    except Exception as error:
        return in_words(error)
    return "" if spec is not None else f"there is no module {module}"


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu → (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
