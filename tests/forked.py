"""Forks this process in place of starting one that would import torch again, which takes three seconds."""

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch.torch_version import TorchVersion

from residua.study import worker_pool


def fork_workers(monkeypatch) -> None:
    """Fork the workers of studies in this test, unless autograd may refuse to run after a fork.

    It does so with a GPU, and in torch 2.11 sometimes after other tests of the same process.
    """
    if not torch.cuda.is_available() and TorchVersion(torch.__version__) >= "2.13":
        import residua.study.worker_pool  # noqa: F401 (once here, instead of in every worker)

        monkeypatch.setattr(worker_pool, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Forked}))


class Forked:
    """`python -c CODE ARGUMENTS` without its imports: the part of `subprocess.Popen` that a study, or a test, uses."""

    def __init__(
        self,
        arguments: Sequence[str],
        stderr: Any,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        **others: object,
    ) -> None:
        code, *rest = arguments[arguments.index("-c") + 1 :]
        (its_input, to_it), (from_it, its_output) = os.pipe(), os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # it collects its own garbage, and does not look through this process's
        self.pid = os.fork()
        self.returncode: int | None = None
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            for number, file in enumerate((its_input, its_output, stderr.fileno())):
                os.dup2(file, number)
            kept = [2, *sorted(pass_fds), 1024]
            for before, after in pairwise(kept):
                os.closerange(before + 1, after)  # another worker's input, held open here, would never end
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ.update(env or {})
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = ["-c", *rest]
            become(lambda: exec(code, {}))
        gc.unfreeze()
        os.close(its_input)
        os.close(its_output)
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._reap(0)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self.returncode is None:
            process, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if process else None
        return self.returncode


def become(work: Callable[[], Any]) -> NoReturn:
    """In a forked process: do this and exit with Python's exit status."""
    code = 70
    try:
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
