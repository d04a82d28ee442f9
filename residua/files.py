"""Atomic writes: a file or folder that has its name is complete, even after a crash or a power cut.

Everything is written under a temporary name (it starts with `UNFINISHED`), flushed to disk, then renamed. This is the
only place that does so. It imports nothing but the standard library, so every room may use it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNFINISHED = ".unfinished-"
# Some file systems cannot flush a folder's list of names.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)


def flush(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _UNSUPPORTED:
            raise


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file as a whole, or leave the old one as it was. Several processes may write the same file."""
    temporary = unfinished(path, unique=True)
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(final: Path, *, unique: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `final` if the block succeeds and is removed if it fails.

    `final` must not exist or be an empty folder: raises `FileExistsError` otherwise. With `unique`, several processes
    may write the same folder, and the first to finish wins; without, leftovers of a killed process are removed.
    """
    temporary = unfinished(final, unique=unique)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def unfinished(path: Path, *, unique: bool = False) -> Path:
    """The temporary name of a file or folder, in the same parent folder."""
    mark = f"{os.getpid()}-{secrets.token_hex(3)}-" if unique else ""
    return path.with_name(f"{UNFINISHED}{mark}{path.name}")


def publish(temporary: Path, final: Path) -> None:
    """Flush a folder and all in it, then give it its final name."""
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        raise
    flush(final.parent)


def is_plain_name(name: str) -> bool:
    """Whether a name is that of one visible file or folder: no path, no leading dot, nothing unprintable."""
    return bool(name) and name.isprintable() and not name.startswith(".") and not {"/", "\\"} & set(name)


def refuse_used(out: Path, option: str = "--out") -> None:
    """Refuse non-empty folders, files and the working directory; `option` is what the person named it with."""
    if out.resolve() == Path.cwd():
        raise ValueError(f"{out} is the folder you are in: choose a new one for {option}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another {option}.")
