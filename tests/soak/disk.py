"""Disks that fill up: a small file system where mounting is permitted, a limit on the size of files elsewhere."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEGABYTES = 64
FILLER = "filler"


class SmallDisk:
    """A file system of its own, in memory. It is full for every process until `empty`."""

    title = f"a file system of {MEGABYTES} MB that is filled up (ENOSPC)"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int, processes: Iterable[int]) -> None:
        """Leave so many bytes, but at most one block more."""
        free = os.statvfs(self.path)
        size = max(0, free.f_bavail * free.f_frsize - leave)
        with suppress(OSError), (self.path / FILLER).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def empty(self) -> None:
        (self.path / FILLER).unlink(missing_ok=True)


class SmallFiles:
    """A folder in which the processes of a job may write only short files from the moment of the fault on."""

    title = "a limit on the size of files (EFBIG), because mounting is not permitted here"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int, processes: Iterable[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (leave, resource.RLIM_INFINITY))

    def empty(self) -> None:
        """The limit ended with its processes."""


@contextmanager
def open_disk(path: Path) -> Iterator[SmallDisk | SmallFiles]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield SmallDisk(path) if mounted else SmallFiles(path)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
