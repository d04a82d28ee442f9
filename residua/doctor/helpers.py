"""Checks in several processes: on a GPU the first of each compiles its kernels, for seconds on one core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from residua.doctor.findings import Finding
from residua.machine import python_environment

if TYPE_CHECKING:
    from residua.report.terminal import Progress

Waiting = SimpleQueue[tuple[str, "Future[Finding]"]]
_READY = b"ready\n"


def run_beside(
    checks: Mapping[str, Callable[[], Finding]],
    command: list[str],
    count: int,
    *,
    first: Sequence[str] = (),
    progress: Progress | None = None,
) -> Iterator[Finding]:
    """The findings of checks, in order. `count` helpers begin with `first`; this process makes what none has begun.

    A helper is a process of `command`, which calls `serve`. If it does not start, the others do its share.
    """
    findings: dict[str, Future[Finding]] = {name: Future() for name in checks}
    waiting: Waiting = SimpleQueue()
    for name in sorted(checks, key=lambda name: first.index(name) if name in first else len(first)):
        waiting.put((name, findings[name]))
    helpers = list(_begin(command, count))
    threads = [Thread(target=_distribute, args=(waiting, helper), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    try:
        for name, check in checks.items():
            # a check that can be cancelled has not begun
            yield check() if findings[name].cancel() else findings[name].result()
            if progress is not None:
                progress(sum(finding.done() for finding in findings.values()), len(checks))
    finally:
        for finding in findings.values():
            finding.cancel()
        for helper in helpers:
            helper.kill()
        for thread in threads:
            thread.join()
        for helper in helpers:
            with helper:  # closes its pipes
                pass


def serve(checks: Mapping[str, Callable[[], Finding]]) -> None:
    """A helper: make the checks that standard input names, one a line, and answer each with a line of JSON."""
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of libraries is not an answer
    os.write(answers, _READY)
    for line in sys.stdin:
        os.write(answers, json.dumps(asdict(checks[line.rstrip("\n")]())).encode() + b"\n")


def _begin(command: list[str], count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start `count` processes, or as many as the system allows."""
    pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
    with suppress(OSError):
        for _ in range(count):
            yield subprocess.Popen(command, bufsize=0, env=python_environment(), stdin=pipe, stdout=pipe, stderr=quiet)


def _distribute(waiting: Waiting, helper: subprocess.Popen[bytes]) -> None:
    """Give a helper one check after the other, until none waits or it dies."""
    assert helper.stdin is not None and helper.stdout is not None
    if helper.stdout.readline() != _READY:
        return
    with suppress(Empty):
        while helper.poll() is None:
            name, finding = waiting.get_nowait()
            if finding.set_running_or_notify_cancel():
                answer = b""
                with suppress(OSError):
                    helper.stdin.write(name.encode() + b"\n")
                    answer = helper.stdout.readline()
                finding.set_result(Finding(**json.loads(answer)) if answer else _died(name, helper.wait()))


def _died(name: str, status: int) -> Finding:
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    words = f"the process that made this check {how}"
    return Finding("self-test", name, "failed", words, "report this with `residua doctor --json`")
