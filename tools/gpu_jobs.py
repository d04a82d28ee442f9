"""Run benchmarks, tests and studies on one GPU side by side, while every timing has the GPU to itself.

    python tools/gpu_jobs.py jobs.toml --out results --seconds 300

Most of a benchmark is compiling, which needs processors; only its rounds need a quiet GPU. jobs.toml has a table for
each job:

    [text]
    run = "residua data prepare corpus.jsonl --out text"

    [step-s]
    run = "residua bench step s --rounds 4 --compare 'exoformer,exoformer env:NAME=1' --out step-s.json"
    memory = 60             # GiB that it reserves on the GPU; it starts once they are free, in the order of the file

    [study]
    run = "residua compare study.toml --data text --results study.json"
    after = ["text"]
    environment = { OMP_NUM_THREADS = "2" }

Commands run in `--out`, where each has its log. `residua` there is this package; the word `env:NAME=VALUE` in a case of
`bench step --rounds` sets a variable for that case alone. While one command times steps in turns, all others are
stopped. After `--seconds` the rest is ended; the same command then runs what has not ended well.
"""  # fmt: skip

from __future__ import annotations

import argparse
import fcntl
import os
import runpy
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

WORD = "env:"
QUIET = "GPU_JOBS_FOLDER"
"""The environment variable that names the folder of logs to the commands of jobs."""
LOCK = "quiet.lock"
"""The file in this folder that a timing process locks while others are stopped."""
SHARED = "CUDA_MPS_PIPE_DIRECTORY"
"""The variable with which kernels of several processes run at the same time, by NVIDIA's MPS. Timings do without it."""
SETTLE = 1.5
"""Seconds for launched work of stopped processes to end."""


@dataclass
class Job:
    """A command, and what it waits for."""

    name: str
    run: str
    memory: float = 0.0
    after: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file, in its order."""
    return [Job(name, **table) for name, table in tomllib.loads(path.read_text(encoding="utf-8")).items()]


def run_jobs(jobs: list[Job], out: Path, memory: float, seconds: float) -> bool:
    """Start each job when its turn comes; returns whether all have ended well."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    running: dict[str, tuple[Job, subprocess.Popen[bytes], float]] = {}
    waiting = [job for job in jobs if not _done(out, job.name).exists()]
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for name, (_, child, began) in list(running.items()):
                if child.poll() is not None:
                    del running[name]
                    print(f"{name}: exit status {child.returncode} after {time.monotonic() - began:.0f} s", flush=True)
                    (out / f"{name}.pid").unlink()
                    if child.returncode == 0:
                        _done(out, name).touch()
            free = memory - sum(job.memory for job, _, _ in running.values())
            for job in list(waiting):
                missing = [name for name in job.after if not _done(out, name).exists()]
                if missing and not {*missing} & {*running, *(other.name for other in waiting)}:
                    waiting.remove(job)
                    print(f"{job.name}: not run, since {', '.join(missing)} did not end well", flush=True)
                if missing:
                    continue
                if job.memory > free:
                    break  # later jobs that need less do not overtake it
                waiting.remove(job)
                free -= job.memory
                running[job.name] = (job, _start(job, out), time.monotonic())
            _continue_left(out, [child.pid for _, child, _ in running.values()])
            time.sleep(0.2)
    finally:
        for name, (_, child, _) in running.items():
            for process in tree(child.pid):
                with suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            (out / f"{name}.pid").unlink()
    left = [*running, *(job.name for job in waiting)]
    print(f"not ended: {', '.join(left)}" if left else "all jobs have ended", flush=True)
    return all(_done(out, job.name).exists() for job in jobs)


def _done(out: Path, name: str) -> Path:
    return out / f"{name}.done"


def _start(job: Job, out: Path) -> subprocess.Popen[bytes]:
    residua = f'residua() {{ "{sys.executable}" -P "{Path(__file__).resolve()}" residua "$@"; }}; '
    environment = {**os.environ, **job.environment, QUIET: str(out.resolve())}
    with (out / f"{job.name}.log").open("ab") as log:
        child = subprocess.Popen(
            ["bash", "-c", residua + job.run], cwd=out, env=environment, stdin=subprocess.DEVNULL, stdout=log,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    (out / f"{job.name}.pid").write_text(str(child.pid))
    return child


def _continue_left(out: Path, jobs: list[int]) -> None:
    """Continue jobs if nobody holds the lock: a process that was killed while it timed has left them stopped."""
    with (out / LOCK).open("a") as lock, suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for job in jobs:
            if _is_stopped(job):
                for process in tree(job):
                    with suppress(OSError):
                        os.kill(process, signal.SIGCONT)


def _is_stopped(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


def tree(root: int) -> list[int]:
    """A process and all that it has started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


class Quiet:
    """All other jobs of a folder are stopped while this is held."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stopped = folder, list[int]()
        self.lock: Any = None

    def hold(self) -> None:
        if self.lock is not None:
            return
        self.lock = (self.folder / LOCK).open("a")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        for _ in range(2):  # processes that others were just starting
            for path in self.folder.glob("*.pid"):
                with suppress(OSError, ValueError):  # a job that ends or begins right now
                    processes = tree(int(path.read_text()))
                    if os.getpid() not in processes:
                        self._stop(processes)
        time.sleep(SETTLE)

    def _stop(self, processes: list[int]) -> None:
        for process in processes:
            if process not in self.stopped:
                with suppress(OSError):
                    os.kill(process, signal.SIGSTOP)
                    self.stopped.append(process)

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *error: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        for process in reversed(self.stopped):
            with suppress(OSError):
                os.kill(process, signal.SIGCONT)
        self.stopped.clear()
        if self.lock is not None:
            self.lock.close()
            self.lock = None


@contextmanager
def timings_alone(folder: Path) -> Iterator[Quiet]:
    """Within the block, steps in turns, inference and operators are timed while all other jobs are stopped."""
    from residua.bench import inference, operators
    from residua.bench import turns as bench
    from residua.config import variants
    from residua.study import timing
    from residua.train import turns

    quiet, ask, end, open_turn = Quiet(folder), turns.Turn.ask, turns.Turn.end, turns.open_turn
    environment, overrides, opened = turns.python_environment, variants.overrides, bench._open
    inferred, timed, ceilings = inference._timed, operators._time, operators.measure_ceilings
    extra: dict[str, str] = {}

    def inferred_alone(*arguments: Any) -> Iterator[Any]:
        with quiet:
            yield from inferred(*arguments)

    def alone(measure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with quiet:
                return measure(*arguments)

        return run

    def ask_alone(turn: Any, steps: int) -> list[float]:
        quiet.hold()
        return ask(turn, steps)

    def end_alone(turn: Any) -> dict[str, Any]:
        try:
            return end(turn)
        finally:
            quiet.let_go()

    @contextmanager
    def open_alone(*arguments: Any) -> Iterator[Any]:
        quiet.let_go()  # after the baseline: this model compiles first
        try:
            with open_turn(*arguments) as turn:
                yield turn
        finally:
            quiet.let_go()

    def study_timing(*words: str) -> list[str]:
        return [sys.executable, "-P", str(Path(__file__).resolve()), *words]

    def open_with_variables(case: Any, *arguments: Any) -> Any:
        extra.clear()
        extra.update(word.removeprefix(WORD).split("=", 1) for word in case.name.split() if word.startswith(WORD))
        if extra:  # variables change what is compiled, but not the keys of the cache
            own = sha256(repr(sorted(extra.items())).encode()).hexdigest()[:8]
            extra["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor-{own}")
        return opened(case, *arguments)

    def without_variables(words: Any, *rest: Any) -> list[str]:
        return overrides([word for word in words if not word.startswith(WORD)], *rest)

    measured_alone = alone(ceilings)
    changes: list[tuple[Any, str, Any]] = [
        (turns.Turn, "ask", ask_alone),
        (turns.Turn, "end", end_alone),
        (turns, "open_turn", open_alone),
        (turns, "python_environment", lambda **changes: {**environment(**changes), **extra}),
        (timing, "python_command", study_timing),
        (variants, "overrides", without_variables),
        (bench, "_open", open_with_variables),
        (inference, "_timed", inferred_alone),
        (operators, "_time", alone(timed)),
        (inference, "measure_ceilings", measured_alone),
        (operators, "measure_ceilings", measured_alone),
    ]
    with ExitStack() as changed:
        changed.callback(quiet.let_go)
        for change in changes:
            changed.enter_context(patch.object(*change))
        yield quiet


def main() -> None:
    """Run a file of jobs, or, as their commands do, residua or one of its modules with timings alone."""
    if sys.argv[1:3] == ["residua", "bench"] or sys.argv[1:2] == ["-m"]:
        os.environ.pop(SHARED, None)
    if sys.argv[1:2] == ["residua"]:
        sys.argv[:2] = ["residua"]
        from residua.cli.main import main as residua

        with timings_alone(Path(os.environ[QUIET])):
            residua()
        return
    if sys.argv[1:2] == ["-m"]:  # the process in which a study times its models
        with timings_alone(Path(os.environ[QUIET])):
            sys.argv[:2] = []
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--memory", type=float, default=120.0, help="GiB of the GPU that all jobs may reserve")
    parser.add_argument("--seconds", type=float, default=86400.0)
    given = parser.parse_args()
    if not given.jobs.is_file():
        parser.error(f"{given.jobs} does not exist")
    jobs = read_jobs(given.jobs)
    if large := [job.name for job in jobs if job.memory > given.memory]:
        parser.error(f"{', '.join(large)} would never start, nor any job after it: --memory is {given.memory:g} GiB")
    sys.exit(0 if run_jobs(jobs, given.out, given.memory, given.seconds) else 1)


if __name__ == "__main__":
    main()
