"""A rank of a whole run, for tests: `train` as the command calls it, with a death on request."""

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from residua.cli.main import fail
from residua.config.run import RunConfig
from residua.distributed import heartbeat, nodes
from residua.distributed.heartbeat import Heartbeat
from residua.distributed.world import open_world
from residua.files import AppendedFile, WriteError
from residua.train.health import TrainingStopped
from residua.train.timing import Stopwatch
from residua.train.trainer import Trainer, train


def before_writing(act: Callable[[Any], None]) -> None:
    """Call `act` with the writer of a checkpoint before it writes."""
    write = HuggingFaceStorageWriter.write_data

    def acting(writer: Any, *arguments: Any) -> Any:
        act(writer)
        return write(writer, *arguments)

    HuggingFaceStorageWriter.write_data = acting


def hold_save(name: str, gate: str) -> None:
    """Write the checkpoint of that name only when there is a file called `gate`."""

    def wait(writer: Any) -> None:
        while name in str(writer.path) and not Path(gate).exists():
            time.sleep(0.02)

    before_writing(wait)


def fill_disk(name: str, rank: int) -> None:
    """On `rank`, let the disk be full for files, or parts of a checkpoint, with `name` in their path."""
    if os.environ["RANK"] != str(rank):
        return
    append = AppendedFile.write

    def refuse(writer: Any) -> None:
        if name in str(writer.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def appended(file: AppendedFile, piece: bytes) -> None:
        if name in f"{file.path} {piece!r}":
            raise WriteError(file.path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        append(file, piece)

    before_writing(refuse)
    AppendedFile.write = appended  # type: ignore[method-assign]


def lead_astray(name: str, rank: int, place: str) -> None:
    """On `rank`, write the part of the checkpoint of that name into another folder, as if its disk were gone."""

    def stray(writer: Any) -> None:
        if name in str(writer.path) and os.environ["RANK"] == str(rank):
            writer.path = Path(place)

    before_writing(stray)


def slow_down(rank: int, seconds: float) -> None:
    """Let every pass that is timed take so many seconds longer on `rank`."""
    measure = Stopwatch.measure

    @contextmanager
    def late(watch: Stopwatch) -> Iterator[None]:
        with measure(watch):
            time.sleep(seconds * (os.environ["RANK"] == str(rank)))
            yield

    Stopwatch.measure = late  # type: ignore[method-assign]


def hesitate(seconds: float) -> None:
    """Rank 0 waits between finding a mistake and reporting it."""
    fail = Heartbeat.fail

    def late(heart: Heartbeat, reason: str) -> None:
        time.sleep(seconds * (heart.rank == 0))
        fail(heart, reason)

    Heartbeat.fail = late  # type: ignore[method-assign]


def die(mark: Path, rank: int, after: int, by: str = "SIGKILL", patience: float | None = None) -> None:
    """In the first start of the job, before there is a file `mark`, `rank` gets a signal after step `after`.

    `by="node"` kills the agent of torchrun too; `by="hang"` lets its training thread stand still, and all ranks report
    that after `patience` seconds.

    Checkpoints that are being written are finished first. The others lower their patience in that step, not before: on
    a busy machine a rank that starts may be silent.
    """
    train_step = Trainer._train_step

    def last_step(trainer: Trainer) -> None:
        if trainer.done == after:
            trainer.world.settle()
            if by == "hang":
                trainer.world.heartbeat.stall = patience  # type: ignore[attr-defined]
                time.sleep(3600 * (os.environ["RANK"] == str(rank)))
            elif os.environ["RANK"] == str(rank):
                mark.touch()
                os.killpg(0, signal.SIGKILL) if by == "node" else os.kill(os.getpid(), getattr(signal, by))
            elif patience is not None:
                trainer.world.heartbeat.patience = patience  # type: ignore[attr-defined]
        train_step(trainer)

    if not mark.exists():
        Trainer._train_step = last_step  # type: ignore[method-assign]


def main(spec: Path) -> None:
    """`spec`: a JSON file with the configuration file, the run's folder, changes, and faults."""
    torch.set_num_threads(1)
    if "MEETING" in os.environ:  # see `launch.nodes`
        os.environ |= {"MASTER_PORT": os.environ["MEETING"], "TORCHELASTIC_USE_AGENT_STORE": "True"}
    asked = json.loads(spec.read_text())
    for name, fault in {"holds": hold_save, "full": fill_disk, "slow": slow_down, "astray": lead_astray}.items():
        if name in asked:
            fault(*asked[name])
    hesitate(asked.get("hesitates", 0))
    if "dies" in asked:
        die(spec.with_suffix(".died"), **asked["dies"])
    nodes.MAX_SECONDS_FOR_A_FILE = 1.0
    heartbeat.BEAT_SECONDS = asked.get("beat", 1.0)
    config = RunConfig.from_toml(asked["config"]).override(asked.get("changes", []))
    try:
        train(config, asked["out"], resume=asked.get("resume", False), world=open_world(config, Path(asked["out"])))
    except TrainingStopped as stop:
        print(f"residua: {stop}", file=sys.stderr, flush=True)
        sys.exit(stop.exit_code)
    except ValueError as error:
        fail(error)
