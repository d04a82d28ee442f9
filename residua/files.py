"""Atomic writes: a file or folder that has its name is complete, even after a crash or a power cut.

Everything is written under a temporary name (it starts with `UNFINISHED`), flushed to disk, then renamed. This is the
only place that does so. A failed write raises `WriteError`: one sentence with the path, the reason and what is
intact. It imports nothing but the standard library, so every room may use it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from residua.errors import UserError

UNFINISHED = ".unfinished-"
# Some file systems cannot flush a folder's list of names.
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)

_ADVICE = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.ENOTDIR: "choose another folder",
    errno.EEXIST: "choose another folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# Errors that only a write can meet.
_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Errors of a disk, its permissions or a name, hardly of a mistake in a program.
_OF_A_FILE = (*_WRITES, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ESTALE)
GONE = "the partial output was removed"


class WriteError(OSError):
    """A file or folder could not be written; `intact` says what is still good."""

    def __init__(self, path: Path, cause: OSError, intact: str = GONE) -> None:
        super().__init__(cause.errno, cause.strerror or str(cause), str(path))
        self.intact = intact

    def __str__(self) -> str:
        return sentence(self)


def explain(error: OSError) -> tuple[str, str]:
    """The failure with its path, and the remedy: two clauses of a sentence. No error number, no traceback."""
    reason = error.strerror or str(error) or type(error).__name__
    advice = _ADVICE.get(error.errno or 0, "check the disk and its permissions")
    if isinstance(error, WriteError) or error.errno in _WRITES:
        return f"could not write {error.filename or 'a file, or what is printed'}: {reason}", advice
    if error.filename is None:
        return f"the system refused a file: {reason}", advice
    return f"{error.filename}: {reason}", "check its name and its permissions"


def is_disk_failure(error: OSError) -> bool:
    """Whether an error is a disk's: a `WriteError`, or a file that a full, forbidden or broken disk refuses."""
    named = error.filename is not None and error.errno in _OF_A_FILE
    return named or isinstance(error, WriteError) or error.errno in (*_WRITES, errno.EPIPE)


def sentence(error: OSError) -> str:
    """One sentence for a person: the failed read or write, the reason, what is intact, and the remedy."""
    what, advice = explain(error)
    return f"{what}; {error.intact}: {advice}." if isinstance(error, WriteError) else f"{what}: {advice}."


@contextmanager
def writing(path: Path, intact: str = GONE, within: Path | None = None) -> Iterator[None]:
    """Raise `WriteError` for `path` if the block cannot write; errors about files outside `within` pass unchanged.

    `FileExistsError` passes too: another process was faster.
    """
    try:
        yield
    except (FileExistsError, WriteError):
        raise
    except OSError as error:
        if within is not None and error.filename is not None and not _is_within(str(error.filename), within):
            raise
        raise WriteError(path, error, intact) from None


def lock(path: Path, busy: str, intact: str = GONE) -> int:
    """Lock a file, which is made if need be, for this process; refuses in the words of `busy` if another holds it.

    The lock is held until the descriptor is closed, also by processes that inherit it, or all of them have ended.
    """
    import fcntl  # which Windows lacks

    with writing(path, intact):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise UserError(busy) from None
    return descriptor


def _is_within(name: str, folder: Path) -> bool:
    return Path(name).is_relative_to(folder) or Path(name) in folder.parents


@contextmanager
def keeping(intact: str) -> Iterator[None]:
    """Inside the block, a `WriteError` says that `intact`."""
    try:
        yield
    except WriteError as error:
        error.intact = intact
        raise


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


def write_atomically(path: Path, text: str, *, parents: bool = False) -> None:
    """Replace a text file as a whole, or leave the old one as it was. Several processes may write the same file.

    With `parents`, its folder is made; if the file cannot be written, it is removed again.
    """
    temporary = unfinished(path, unique=True)
    with writing(path, "the file is unchanged" if path.exists() else GONE), making(path.parent if parents else None):
        try:
            temporary.write_text(text, encoding="utf-8")
            flush(temporary)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


@contextmanager
def making(folder: Path | None) -> Iterator[None]:
    """Make a folder; if the block fails, remove what was made and is empty."""
    new_folders = [] if folder is None else [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        with suppress(OSError):  # another process has written to it in the meantime
            for path in new_folders:
                path.rmdir()
        raise


@contextmanager
def atomic_folder(final: Path, *, unique: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; it becomes `final` if the block succeeds and is removed if it fails.

    `final` must not exist or be an empty folder: raises `FileExistsError` otherwise. With `unique`, several processes
    may write the same folder, and the first to finish wins. Leftovers of killed processes are removed.
    """
    temporary = unfinished(final, unique=unique)
    shutil.rmtree(temporary, ignore_errors=True)
    _remove_abandoned(final.parent)
    with writing(final, within=temporary), making(final.parent):
        try:
            temporary.mkdir()
            yield temporary
            publish(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


class AppendedFile:
    """A file that grows by whole pieces: one that does not fit is taken back, so that the file stays readable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, piece: bytes) -> None:
        """Append a piece; readers see it at once."""
        with writing(self.path, "its previous contents are intact"):
            before, left = os.fstat(self._file.fileno()).st_size, piece
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(before)
                raise

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        with writing(self.path, "it may lack its last lines"):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # nothing is buffered here
            self._file.close()


def unfinished(path: Path, *, unique: bool = False) -> Path:
    """The temporary name of a file or folder, in the same parent folder; a unique one names its process."""
    mark = f"{os.getpid()}-{_machine()}{secrets.token_hex(3)}-" if unique else ""
    return path.with_name(f"{UNFINISHED}{mark}{path.name}")


def _machine() -> str:
    """Eight digits for this machine or container: elsewhere, the number of a process means another one."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this machine had begun to write to a folder before they were killed."""
    for path in folder.glob(f"{UNFINISHED}*"):
        named = re.match(rf"{UNFINISHED}(\d+)-{_machine()}[0-9a-f]{{6}}-", path.name, re.ASCII)
        if named is None or _is_running(int(named[1])):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # in a shared folder it may belong to somebody else
                path.unlink()


def _is_running(process: int) -> bool:
    """Whether a process runs; one that was killed, but whose parent has not taken note of it, does not."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to somebody else, or there is no such number
        return True
    with suppress(OSError, IndexError):  # not every system has /proc
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


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


def refuse_address(text: str) -> None:
    """Refuse an address such as s3://bucket/run: as a path it would be a local folder called `s3:`."""
    if re.match(r"[A-Za-z][\w+.-]+:/", text):
        raise UserError(
            f"{text} is a URL, but Residua reads and writes only local files: give a path (of a mounted disk, "
            "for example), and copy from or to the URL with another tool."
        )


def refuse_blocked(out: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made because a file has its name or the name of a folder above it."""
    refuse_address(str(out))
    nearest = next((path for path in (out, *out.parents) if path.exists() or path.is_symlink()), None)
    if nearest is not None and not nearest.is_dir():
        blocked = "" if nearest == out else f", so {out} cannot be created"
        raise UserError(f"{nearest} is a file{blocked}: choose another {option}.")


def refuse_used(out: Path, option: str = "--out") -> None:
    """Refuse non-empty folders, files and the working directory; `option` is what the person named it with."""
    if out.resolve() == Path.cwd():
        raise UserError(f"{out} is the working directory: choose a new folder for {option}.")
    refuse_blocked(out, option)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not an empty folder: choose another {option}.")
