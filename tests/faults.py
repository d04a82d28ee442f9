"""A disk that fails at a chosen moment: at the n-th operation that writes below a folder."""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from safetensors import SafetensorError

from residua.storage import tensors as storage

WRITING = set("wax+")


class Disk:
    """Counts operations that write below `root`; from number `fails_at` on they raise `code`, once or for good.

    A full disk (ENOSPC) still renames and flushes; with any other code these fail too.
    """

    def __init__(self, root: Path, fails_at: int = 0, code: int = errno.ENOSPC, *, once: bool = False) -> None:
        self.root, self.fails_at, self.code, self.once = root.resolve(), fails_at, code, once
        self.done = 0
        self.failed: list[str] = []

    def count(self, path: object, what: str) -> None:
        """One more operation on a path; raises if it is its turn, without a file name, as `write` and `fsync` do."""
        if not isinstance(path, str | os.PathLike) or not Path(os.path.abspath(path)).is_relative_to(self.root):
            return
        if self.code == errno.ENOSPC and what in ("rename", "fsync"):
            return
        self.done += 1
        if self.fails_at and (self.done == self.fails_at if self.once else self.done >= self.fails_at):
            self.failed.append(f"{what} {Path(path).name}")
            raise OSError(self.code, os.strerror(self.code))


class _File:
    """A file open for writing; a failing write leaves half of its data."""

    def __init__(self, file: Any, path: str, disk: Disk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, content: Any) -> Any:
        try:
            self._disk.count(self._path, "write")
        except OSError:
            self._file.write(content[: len(content) // 2])
            raise
        return self._file.write(content)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *ending: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def failing(disk: Disk) -> Iterator[None]:
    """Route the file operations of Residua in this process through `disk`."""
    real_open, real_save, real_fsync, real_os_open = io.open, storage.save_file, os.fsync, os.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if not WRITING & set(mode) or not isinstance(file, str | os.PathLike):
            return real_open(file, mode, *arguments, **named)
        disk.count(file, "open")
        return _File(real_open(file, mode, *arguments, **named), os.fspath(file), disk)

    def saved(tensors: Any, path: Path, metadata: Any = None) -> None:
        try:
            disk.count(path, "save")
        except OSError as error:
            raise SafetensorError(
                f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            ) from None
        real_save(tensors, path, metadata)

    def flushed(descriptor: int) -> None:
        disk.count(os.readlink(f"/proc/self/fd/{descriptor}"), "fsync")
        real_fsync(descriptor)

    def os_opened(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            disk.count(path, "create")
        return real_os_open(path, flags, *arguments, **named)

    def counted(name: str, what: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            disk.count(path, what)
            return real(path, *arguments, **named)

        return call

    with (
        patch.object(io, "open", opened),
        patch.object(builtins, "open", opened),
        patch.object(storage, "save_file", saved),
        patch.object(os, "fsync", flushed),
        patch.object(os, "open", os_opened),
        patch.object(os, "mkdir", counted("mkdir", "mkdir")),
        patch.object(os, "rename", counted("rename", "rename")),
        patch.object(os, "replace", counted("replace", "rename")),
    ):
        yield
