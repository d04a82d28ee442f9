"""Runs a command in a forked process: what it printed, how it ended, and that it did end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 120
"""Seconds that a command may take, and as many GiB of memory as ROOM more than this process has."""

ROOM = 6


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status (negative: the signal that ended it) and what it printed."""

    code: int
    output: str
    errors: str


def command(arguments: Sequence[str], folder: Path) -> Done:
    """Run `residua ARGUMENTS` in a folder."""

    def run() -> None:
        from residua.cli.main import main

        subprocess.Popen = popen  # type: ignore[assignment, misc]
        sys.argv = ["residua", *arguments]
        main()

    return in_child(run, folder)


_popen = subprocess.Popen


def popen(arguments: Sequence[str], **settings: Any) -> Any:
    """A stand-in for `subprocess.Popen` that forks the workers of a study, which saves their imports."""
    forked = "-c" in arguments and settings.get("stdin") == subprocess.PIPE
    return Forked(arguments, settings["stderr"].fileno()) if forked else _popen(arguments, **settings)


class Forked:
    """What a study uses of a worker's process."""

    def __init__(self, arguments: Sequence[str], errors: int) -> None:
        code, *rest = arguments[arguments.index("-c") + 1 :]
        (its_input, to_it), (from_it, its_output) = os.pipe(), os.pipe()
        self.pid = os.fork()
        self.returncode: int | None = None
        if self.pid == 0:
            for number, file in enumerate((its_input, its_output, errors)):
                os.dup2(file, number)
            os.closerange(3, 1024)  # another worker's input, held open here, would never end
            sys.stdin = os.fdopen(0)
            sys.argv = ["-c", *rest]
            _become(lambda: exec(code, {}), Path.cwd(), 1, 2)
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode


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
            os.killpg(process, signal.SIGKILL)  # what it started and left behind
        for file in (output, errors):
            file.seek(0)
        code = os.waitstatus_to_exitcode(status)
        return Done(code, output.read().decode(errors="replace"), errors.read().decode(errors="replace"))


def _become(work: Callable[[], Any], folder: Path, output: int, errors: int) -> None:
    """In the child: never returns."""
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.chdir(folder)
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
