"""Runs a command in a forked process: its output, its exit status, and that it ends."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from residua.study import worker_pool
from tests.forked import Forked, become

LIMIT = 120
"""Seconds that a command may take, and as many GiB of memory as ROOM more than this process has."""

ROOM = 6


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (negative: the signal that ended it) and its output."""

    code: int
    output: str
    errors: str


def command(arguments: Sequence[str], folder: Path) -> Done:
    """Run `residua ARGUMENTS` in a folder."""

    def run() -> None:
        from residua.cli.main import main

        worker_pool.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": _worker})  # type: ignore[assignment]
        sys.argv = ["residua", *arguments]
        main()

    return in_child(run, folder)


def _worker(arguments: Sequence[str], **settings: Any) -> Forked:
    """A worker of a study, without its imports, among the processes that end with the command."""
    return Forked(arguments, **{**settings, "start_new_session": False})


def in_child(work: Callable[[], Any], folder: Path) -> Done:
    """Call a function in a forked process, in that folder. This process must not have trained: autograd forbids it."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            signal.alarm(LIMIT)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            room = pages * os.sysconf("SC_PAGE_SIZE") + (ROOM << 30)
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            _become(work, folder, output.fileno(), errors.fileno())
        _, status = os.waitpid(process, 0)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # processes that it started and left behind
        for file in (output, errors):
            file.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Done(code, output.read().decode(errors="replace"), errors.read().decode(errors="replace"))


def _become(work: Callable[[], Any], folder: Path, output: int, errors: int) -> NoReturn:
    """In the child."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.chdir(folder)
    become(work)
