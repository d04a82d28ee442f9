"""The page of a training run, served by a process of its own: whatever happens to it, the run continues.

The run opens the socket, so that the address is known at once, and hands it on. The other process imports no torch,
runs at low priority, only reads, and ends when the run does, however that ends: its standard input closes then. Pages
that are open get the last numbers first.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from residua.files import explain
from residua.machine import python_command, python_environment
from residua.watch.run_list import RunList
from residua.watch.server import HOST, Server, how_to_open

PATIENCE = 3.0
"""Seconds that a run waits for its page to get the last numbers; a page in the background asks later, without it."""
SETTLE = 0.2
"""Seconds until all that a killed run leaves is there to be seen."""


@contextmanager
def serve_page(folder: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Serve the page of the run in `folder` inside the block; `tell` says where, or why not."""
    process = None
    try:
        process = _start(folder, tell)
    except OSError as error:
        tell(f"The live page is off: {explain(error)[0]}; the run continues without it.")
    try:
        yield
    finally:
        if process is not None:
            _stop(process)


def _start(folder: Path, tell: Callable[[str], object]) -> subprocess.Popen[bytes]:
    key = secrets.token_urlsafe(9)
    with socket.create_server((HOST, 0)) as listening:
        number = listening.fileno()
        process = subprocess.Popen(
            python_command("-m", "residua.watch.server_process", str(folder.absolute()), str(number)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment(),
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C is for the run, which saves first
        )
        assert process.stdin is not None
        process.stdin.write(f"{key}\n".encode())  # not as an argument: others could read it there
        process.stdin.flush()
        for line in how_to_open(listening.getsockname()[1], key):
            tell(line)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # it ends by itself soon
        process.wait(PATIENCE)


def main() -> None:
    """The other process: arguments are the run's folder and the socket's number; standard input begins with the key."""
    folder, number = sys.argv[1:]
    with suppress(OSError):
        os.nice(10)
    key = sys.stdin.readline().strip()
    server = Server(RunList([Path(folder)]), key=key, listening=socket.socket(fileno=int(number)))
    Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    time.sleep(SETTLE)
    server.end()


if __name__ == "__main__":
    main()
