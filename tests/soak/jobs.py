"""Starts the processes of a run, forked from one that has imported torch or by the real commands, and ends them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tests.distributed.launch import Started, environment, start

LIMIT = 240.0
"""Seconds after which a job that should have ended counts as hung, on a busy machine."""

ALONE = 5.0
"""Seconds that the other ranks get to end by themselves before they are terminated, as torchrun does."""


class Job:
    """The processes of a session. `processes` may be signalled; each has its exit code when it has ended."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def processes(self) -> list[int]:
        raise NotImplementedError

    def codes(self) -> list[int | None]:
        raise NotImplementedError

    def said(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def running(self) -> bool:
        """Whether all of them still run."""
        return all(code is None for code in self.codes())

    def end(self, limit: float = LIMIT) -> bool:
        """Wait until all have ended; after the first, the others are terminated as torchrun does. False if one hung."""
        until = time.monotonic() + limit
        while self.running() and time.monotonic() < until:
            time.sleep(0.01)
        alone = time.monotonic() + ALONE
        while None in self.codes() and time.monotonic() < min(alone, until):
            time.sleep(0.01)
        self.send(signal.SIGTERM)
        while None in self.codes() and time.monotonic() < until:
            time.sleep(0.01)
        hung = None in self.codes()
        self.send(signal.SIGKILL)
        self.close()
        return not hung

    def send(self, number: int) -> None:
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, number)


class Forked(Job):
    """Ranks forked from a process that has everything imported, with this process in the place of torchrun."""

    def __init__(self, ranks: int, arguments: Sequence[str]) -> None:
        self.started: list[Started] = start(ranks, "tests.soak.rank", *arguments)
        super().__init__(self.started[0].output.parent)

    def processes(self) -> list[int]:
        return [s.process.pid for s in self.started if s.process.exitcode is None and s.process.pid is not None]

    def codes(self) -> list[int | None]:
        return [s.process.exitcode for s in self.started]

    def said(self) -> str:
        return "".join(s.said() for s in self.started)

    def close(self) -> None:
        for s in self.started:
            s.process.join()


class Commanded(Job):
    """`residua train`, or the same under a real torchrun, which may be hit like its ranks."""

    def __init__(self, ranks: int, arguments: Sequence[str], output: Path) -> None:
        super().__init__(output)
        output.mkdir()
        torchrun = [
            "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "--redirects", "3", "--log-dir", str(output / "ranks"),
        ]  # fmt: skip
        command = [sys.executable, *(torchrun if ranks > 1 else []), "-m", "residua.cli.main", *arguments]
        # torchrun itself prints a traceback when a rank fails: only the output of the ranks is checked
        self._main_output = output / ("torchrun" if ranks > 1 else "process.log")
        with self._main_output.open("w") as file:
            self.main = subprocess.Popen(command, stdout=file, stderr=file, env=environment())

    def processes(self) -> list[int]:
        main = [self.main.pid] if self.main.poll() is None else []
        return main + [pid for pid in holders(self.output) if pid != self.main.pid]

    def codes(self) -> list[int | None]:
        """The exit code of the main process; of the others we can read only whether they still run."""
        code = self.main.poll()
        return [code, *(None for pid in holders(self.output) if pid != self.main.pid)] if code is not None else [None]

    def said(self) -> str:
        return "".join(log.read_text() for log in sorted(self.output.rglob("*.log")))

    def close(self) -> None:
        self.main.wait()


def holders(folder: Path) -> Iterator[int]:
    """The processes, except this one, that have a file in `folder` open."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with suppress(OSError):
            if any(os.readlink(file).startswith(f"{folder}/") for file in (process / "fd").iterdir()):
                yield int(process.name)
