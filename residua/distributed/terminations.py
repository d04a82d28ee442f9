"""SIGTERM for a rank: torchrun sends it when another rank has ended, and this one still has to say which."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

from residua.distributed.heartbeat import Heartbeat


class Terminations:
    """From here on SIGTERM ends this rank only after its heartbeat thread has looked for a rank that died.

    `train` handles it itself while it can save the run (`StopSignals`). Python runs handlers in the main thread, which
    may wait in a collective; so a byte in a pipe tells the heartbeat thread at once.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if not self._main:
            return
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        self._previous: Any = signal.signal(signal.SIGTERM, heartbeat.end_soon)
        self._wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._pipe = writes
        threading.Thread(target=_listen, args=(reads, heartbeat), name="residua-signals", daemon=True).start()

    def ignore(self) -> None:
        """This rank is ending anyway."""
        if self._main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        """As it was before."""
        if self._main:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGTERM, self._previous)
            os.close(self._pipe)


def _listen(reads: int, heartbeat: Heartbeat) -> None:
    """Hurry the heartbeat for every SIGTERM, until the other end of the pipe is closed."""
    with suppress(OSError):
        while number := os.read(reads, 1):
            if number[0] == signal.SIGTERM:
                heartbeat.hurry()
    os.close(reads)
