"""Starts ranks for tests, as torchrun does but without its imports: they are forked from a process that has them."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PRELOADED = {"tests.distributed.worker", "tests.distributed.train_run", "tests.soak.rank"}
LIMIT = 600.0
"""Seconds that a job may take on a busy machine. Less than pytest's own limit, so that a test can show the output."""


def environment(**more: Any) -> dict[str, str]:
    """The environment of this process, on one thread, without the variables of an outer launcher or of pytest."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "PYTEST"))}
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **{k: str(v) for k, v in more.items()}}


@dataclass
class Started:
    """A started process, whose output goes to a file."""

    process: ForkServerProcess
    output: Path
    store: dist.Store | None = None
    """Kept: the ranks of a job lose their store with it."""

    def wait(self, limit: float = LIMIT) -> str:
        """Wait for its end and return its output; fails after `limit` seconds."""
        self.process.join(limit)
        assert self.process.exitcode is not None, f"still running after {limit:.0f} s: {self.said()}"
        return self.said()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(
    ranks: int, module: str, *arguments: Any, places: Sequence[Path] | None = None, per_node: int | None = None
) -> list[Started]:
    """Run `module.main(*arguments)` on so many ranks, each in its own working folder if `places` are given.

    With `per_node`, they see nodes of so many ranks each.

    This process serves their store, as torchrun does for its ranks. It listens on a port that the system chooses, so
    jobs that run at the same time cannot collide.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = True
    folder, node = _new_folder(), per_node or ranks
    return [
        _fork(
            folder / str(rank), environment(RANK=rank, LOCAL_RANK=rank % node, LOCAL_WORLD_SIZE=node, **shared), module,
            arguments, store, None if places is None else places[rank],
        )
        for rank in range(ranks)
    ]  # fmt: skip


def launch(ranks: int, module: str, *arguments: Any, again: bool = False) -> None:
    """Run a job to its end; a rank that fails fails the test with its output.

    `again`: start once more if a rank dies by a segmentation fault. It was seen once in gloo's own thread
    (`pt_gloo_runloop`), in a process that makes many groups in turn.
    """
    started, until = start(ranks, module, *arguments), time.monotonic() + LIMIT
    try:
        outputs = [rank.wait(max(0.0, until - time.monotonic())) for rank in started]
    finally:
        for rank in started:
            rank.kill()
    failed = [number for number, rank in enumerate(started) if rank.process.exitcode != 0]
    if again and any(started[number].process.exitcode == -signal.SIGSEGV for number in failed):
        warnings.warn(f"a rank of {module} died by a segmentation fault: all are started once more", stacklevel=2)
        return launch(ranks, module, *arguments)
    assert not failed, f"ranks {failed} of {module} failed:\n" + "\n".join(outputs[i][-3000:] for i in failed)


def torchrun(ranks: int, module: str, *arguments: Any, restarts: int = 0) -> Started:
    """Run `module.main(*arguments)` under the agent of `torchrun --standalone`, to its end, and return the agent."""
    agent = _fork(_new_folder() / "agent", environment(), __name__, (ranks, restarts, module, arguments))
    try:
        agent.wait()
    finally:
        agent.process.terminate()  # which it passes on to its ranks
        agent.process.join(60)
        agent.kill()
    return agent


@contextmanager
def nodes() -> Iterator[Callable[..., Started]]:
    """Starts the agents of `torchrun --nnodes 2 --nproc-per-node 1`, which meet in a store that this process serves.

    Each call starts one more node, in a working folder of its own: `node(place, restarts, module, *arguments)`. Its
    rank finds the store of the job here too, in MEETING. PyTorch 2.13 does not tell a node that joins later where the
    agents keep theirs, unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = environment(MEETING=store.port, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1)
    meeting = {"nodes": 2, "endpoint": f"127.0.0.1:{store.port}", "id": str(uuid.uuid4())}
    started: list[Started] = []

    def node(place: Path, restarts: int, module: str, *arguments: Any) -> Started:
        given = (1, restarts, module, arguments, meeting)
        started.append(_fork(_new_folder() / "agent", variables, __name__, given, place=place))
        return started[-1]

    try:
        yield node
    finally:
        for agent in started:
            with suppress(ProcessLookupError):
                os.killpg(agent.process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it leads a group, see `main`
            agent.process.join()


def main(
    ranks: int, restarts: int, module: str, arguments: tuple[Any, ...], meeting: dict[str, Any] | None = None
) -> None:
    """The agent: torchrun without its command line. Its ranks are forked from it."""
    if meeting is not None:
        os.setpgid(0, 0)  # so that a test can kill a whole node
    given = meeting or {"nodes": 1, "endpoint": "localhost:0", "id": str(uuid.uuid4())}
    config = LaunchConfig(
        min_nodes=given["nodes"],
        max_nodes=given["nodes"],
        nproc_per_node=ranks,
        run_id=given["id"],
        rdzv_backend="c10d",
        rdzv_endpoint=given["endpoint"],
        rdzv_configs={} if meeting is None else {"is_host": False, "keep_alive_interval": 3},
        local_addr=None if meeting is None else "127.0.0.1",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, import_module(module).main)(*arguments)


def _fork(
    output: Path, variables: dict[str, str], module: str, arguments: tuple[Any, ...], store: dist.Store | None = None,
    place: Path | None = None,
) -> Started:  # fmt: skip
    forked = _fork_server()
    # a daemon ends with pytest, but may not have children: the agent of torchrun is not one
    daemon = store is not None
    process = forked.Process(target=_run, args=(variables, output, module, arguments, place), daemon=daemon)
    process.start()
    return Started(process, output, store)


@cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """A process that has imported the modules of ranks. It skips missing modules, and gets the path of the tests."""
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(list(PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        forkserver.ensure_running()
    return forked


@cache
def _outputs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ranks-")


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_outputs().name))


def _run(variables: dict[str, str], output: Path, module: str, arguments: tuple[Any, ...], place: Path | None) -> None:
    if place is not None:
        os.chdir(place)
    assert sys.modules.keys() >= PRELOADED, "the fork server imported nothing ahead"
    os.environ.clear()
    os.environ.update(variables)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    import_module(module).main(*arguments)
