"""The faults: they hit the processes, the disk or the data of a run at a random moment."""

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.soak.jobs import Job

CHECKPOINT_BYTES = 120_000
"""About the size of a checkpoint of these runs: less than this is left on a disk that is full."""


@dataclass
class Place:
    """The targets of a fault."""

    job: Job
    disk: "SmallDisk | SmallFiles"
    data: Path
    chance: random.Random

    def send(self, number: int, *, everyone: bool = False) -> None:
        """A signal to one of the processes, or to all."""
        processes = self.job.processes()
        for process in processes if everyone else self.chance.sample(processes, min(1, len(processes))):
            with suppress(ProcessLookupError):
                os.kill(process, number)


def kill(place: Place) -> None:
    place.send(signal.SIGKILL, everyone=place.chance.random() < 0.3)


def terminate(place: Place) -> None:
    """Like a cluster, which signals all ranks, or a person who picks one."""
    place.send(signal.SIGTERM, everyone=place.chance.random() < 0.5)


def pause(place: Place) -> None:
    """A process stops for a moment, then continues; the others wait for it."""
    processes = place.job.processes()
    stopped = place.chance.sample(processes, min(1, len(processes)))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        time.sleep(place.chance.uniform(0.02, 0.4))


def freeze(place: Place) -> None:
    """A process stops and is killed while stopped."""
    place.send(signal.SIGSTOP, everyone=True)
    time.sleep(place.chance.uniform(0.02, 0.4))
    place.send(signal.SIGKILL)
    place.send(signal.SIGCONT, everyone=True)


def fill_disk(place: Place) -> None:
    place.disk.fill(place.chance.randrange(CHECKPOINT_BYTES), place.job.processes())


def hide_shard(place: Place) -> None:
    """A shard disappears; the run has it open and continues, until it is killed and should be resumed."""
    shard = place.chance.choice(sorted(place.data.glob("*train*")))
    shard.rename(shard.with_name(f"hidden-{shard.name}"))
    place.send(signal.SIGKILL)


def show_shards(data: Path) -> None:
    """Bring hidden shards back."""
    for shard in data.glob("hidden-*"):
        shard.rename(shard.with_name(shard.name.removeprefix("hidden-")))


@dataclass(frozen=True)
class Fault:
    """`ends`: whether the session is over after it. `refused`: whether the next one must be refused in a sentence."""

    name: str
    strike: Callable[[Place], None]
    ends: bool = True
    refused: bool = False


SIGNALS = {
    Fault("SIGKILL", kill): 8,
    Fault("SIGTERM", terminate): 5,
    Fault("SIGSTOP, SIGCONT", pause, ends=False): 4,
    Fault("SIGSTOP, SIGKILL", freeze): 3,
}
"""How many of twenty signals are of each sort."""

FULL, GONE = Fault("disk full", fill_disk), Fault("shard gone", hide_shard, refused=True)
FAULTS = (*SIGNALS, FULL, GONE)
MOMENTS = ("start-up", "steps", "save")
Deck = list[tuple[Fault, str]]


def deal(signals: int, chance: random.Random) -> Deck:
    """So many signals in random order, each with its moment; among every ten a full disk and a vanished shard."""
    sorts = [fault for fault, count in SIGNALS.items() for _ in range(count)]
    chosen = [sorts[number % len(sorts)] for number in chance.sample(range(len(sorts)), len(sorts))]
    faults = [chosen[number % len(chosen)] for number in range(signals)] + [FULL, GONE] * -(-signals // 10)
    chance.shuffle(faults)
    moments = [MOMENTS[number % len(MOMENTS)] for number in range(len(faults))]
    chance.shuffle(moments)
    return list(zip(faults, moments, strict=True))


MEGABYTES = 64
FILLER = "filler"


class SmallDisk:
    """A separate file system in memory. It is full for every process until `empty`."""

    title = f"a file system of {MEGABYTES} MB that is filled up (ENOSPC)"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int, processes: Iterable[int]) -> None:
        """Leave so many bytes, but at most one block more."""
        free = os.statvfs(self.path)
        size = max(0, free.f_bavail * free.f_frsize - leave)
        with suppress(OSError), (self.path / FILLER).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def empty(self) -> None:
        (self.path / FILLER).unlink(missing_ok=True)


class SmallFiles:
    """A folder in which the processes of a job may write only short files from the moment of the fault on."""

    title = "a limit on the size of files (EFBIG), because mounting is not permitted here"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, leave: int, processes: Iterable[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, (leave, resource.RLIM_INFINITY))

    def empty(self) -> None:
        """The limit ended with its processes."""


@contextmanager
def open_disk(path: Path) -> Iterator[SmallDisk | SmallFiles]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield SmallDisk(path) if mounted else SmallFiles(path)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
