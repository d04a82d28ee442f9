"""The machine that a process runs on: cores, device, memory, the processes it starts. Does not import torch."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.errors import UserError

if TYPE_CHECKING:
    import torch


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def this_process() -> str:
    """A name of this process that no other has: host, process namespace, number, start. See `has_ended`."""
    pid = os.getpid()
    return f"{_processes_here()} {pid} {_started(pid) or ''}".rstrip()


def has_ended(process: str) -> bool:
    """Whether the process of that name has surely ended: one of another machine or container may run."""
    place, _, rest = process.rpartition(" ")
    place, _, pid = place.rpartition(" ")
    if place != _processes_here() or not (pid.isdecimal() and len(pid) < 12 and rest.isdecimal()):
        return False
    return _started(int(pid)) != rest


def _processes_here() -> str:
    """The processes that this one can see: a container has its own numbers."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process was started, in the system's own count; None if it has ended, or where there is no /proc."""
    try:
        # after the name, which may hold anything: state, then 18 more, then the start
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def start_helpers(command: list[str], count: int, **settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start `count` processes that read a pipe and print no errors, or as many as the system allows."""
    with suppress(OSError):
        for _ in range(count):
            yield subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, **settings)


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


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Within the block, an environment variable has this value, whatever it had before."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def choose_device(name: str, setting: str = "device") -> torch.device:
    """`cpu`, `cuda`, or with `auto` a GPU if there is one; `setting` is what the person chose it with."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"{setting} is {name!r}: choose auto, cpu or cuda.")
    gpu = torch.cuda.is_available()
    if name == "cuda" and not gpu:
        raise UserError(f"{setting} is 'cuda' but PyTorch sees no GPU: choose auto or cpu.")
    return torch.device("cuda" if gpu and name != "cpu" else "cpu")


_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|cannot allocate memory|out of memory", re.IGNORECASE)


def out_of_memory(error: BaseException) -> str | None:
    """`the GPU` or `this machine` if an error says that its memory is full; None for any other error."""
    if type(error).__name__ in ("OutOfMemoryError", "AcceleratorError") and _NO_MEMORY.search(
        str(error) or "out of memory"
    ):
        return "the GPU"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error))):
        return "the GPU" if "CUDA" in str(error) else "this machine"
    return None


class TooLarge(UserError):
    """A model does not fit into the memory that is free; the message says its size and what is free."""


def require_memory(what: str, needed: int, advice: str, device: torch.device | None = None) -> None:
    """Refuse before memory is taken: `what` needs that many bytes, and fewer are free."""
    free = free_memory(device)
    if free is not None and needed > free:
        where = "the GPU" if device is not None and device.type == "cuda" else "this machine"
        raise TooLarge(f"{what} {short_bytes(needed)} of memory, but {where} has {short_bytes(free)} free: {advice}.")


def short_bytes(count: int) -> str:
    """A size in words: 3400000 → 3.2 MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 1 << 29 else f"{count / 2**20:,.1f} MiB"


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that a process could still take, of a GPU or of this machine (with swap); None if it is not known.

    On the machine: the least of what the system, each control group of the process and its own limit leave.
    """
    if device is not None and device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    system, swap = _free_in_system()
    limits = [system, *(free + swap for free in _free_in_groups()), _free_in_limit()]
    return min((free for free in limits if free is not None), default=None)


def _free_in_system() -> tuple[int | None, int]:
    """Bytes that the system could still give, with swap, and the swap alone."""
    lines = _read("/proc/meminfo").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    swap = kib.get("SwapFree", 0) * 1024
    return (kib["MemAvailable"] * 1024 + swap if "MemAvailable" in kib else None), swap


def _free_in_groups(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> list[int]:
    """Bytes free in each control group of this process, without swap; droppable pages of files count as free."""
    free = []
    for line in _read(membership).splitlines():
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            names = ("memory.max", "memory.current", "inactive_file")
            base = Path(root)
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = Path(root, "memory")
        else:
            continue
        place = base / group.lstrip("/")
        for folder in (place, *place.parents):
            if folder.is_relative_to(base):
                limit, used = (_read(folder / name).strip() for name in names[:2])
                if limit.isdecimal() and used.isdecimal():
                    cached = re.search(rf"^{names[2]} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                    free.append(max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0)))
    return free


def _free_in_limit() -> int | None:
    """Bytes that `ulimit -v` leaves."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, pages = resource.getrlimit(resource.RLIMIT_AS)[0], _read("/proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not pages:
        return None
    return max(0, limit - int(pages[0]) * resource.getpagesize())


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
