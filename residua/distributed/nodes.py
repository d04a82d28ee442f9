"""Several nodes: the processes of a job find each other, share the run's folder, and record their last collectives.

torchrun counts restarts separately on each node, and a node that joins later begins at 0. So the processes themselves
agree on a name for their start (`meet`); it is a restart if any process of the job has been started before.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from residua.files import UNFINISHED, write_atomically, writing

POLL_SECONDS = 0.05
MAX_SECONDS_FOR_A_FILE = 20.0
"""How long a rank looks for a file of another node: NFS may cache for a while that the file did not exist."""


@dataclass(frozen=True)
class Start:
    """One start of a job: a unique name, and whether the job was started before."""

    name: str
    again: bool


def meet(store: dist.Store, rank: int, size: int, restarts: int) -> Start:
    """Agree with the other processes of this start; the store may hold entries of processes of earlier starts.

    `restarts` is torchrun's count on this node.

    Every process posts a new number. Rank 0 answers each number with the name of the start, until all other ranks have
    received it. Nobody reads the answer to a number that a dead process posted.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"here/{rank}", f"{mine} {restarts}")
        name = store.get(f"start/{mine}").decode()
        store.add(f"heard/{name}", 1)
        return Start(name, again=store.get(f"again/{name}") == b"True")
    again = store.add("starts", 1) > 1 or restarts > 0
    others = [f"here/{other}" for other in range(1, size)]
    answered: set[str] = set()
    while store.add(f"heard/{mine}", 0) < size - 1:
        if store.check(others):
            here = [value.decode().split() for value in store.multi_get(others)]
            again = again or any(int(count) > 0 for _, count in here)
            for number, _ in here:
                if number not in answered:
                    store.set(f"start/{number}", mine)
                    answered.add(number)
        time.sleep(POLL_SECONDS)
    store.set(f"again/{mine}", str(again))
    return Start(mine, again)


def node_count() -> int:
    """The number of nodes on which torchrun started this job."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


def ranks_here(rank: int, size: int) -> range:
    """The ranks of this node; torchrun gives them neighbouring numbers."""
    first = rank - int(os.environ.get("LOCAL_RANK", rank))
    return range(first, min(size, first + int(os.environ.get("LOCAL_WORLD_SIZE", size))))


def keep_records(folder: Path | None) -> None:
    """Turn on PyTorch's flight recorder of collectives. Call it before the process group starts.

    When an NCCL collective times out, PyTorch itself writes its records into the run's folder.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if folder is not None:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder.resolve() / "nccl-trace-rank-"))


def write_records(folder: Path, rank: int) -> Path | None:
    """Write this rank's last collectives as JSON; returns the path, or None if it cannot be written."""
    records = {}
    for library, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(torch._C._distributed_c10d, name, None)
        with suppress(RuntimeError, ValueError):
            records[library] = None if dump is None else json.loads(dump())
    path = folder / f"collectives-rank-{rank}.json"
    try:
        write_atomically(path, json.dumps(records, indent=1) + "\n")
    except OSError:
        return None
    return path


class Probe:
    """Temporary files of every rank in the run's folder, to check that all ranks have the same folder.

    In order: rank 0 writes its own (`write`), the others look for it and write theirs (`answer`), rank 0 looks for
    theirs (`missing`), and every rank removes its own (`remove`).
    """

    def __init__(self, folder: Path, rank: int, token: str) -> None:
        self.folder, self.rank, self.token = folder, rank, token

    def write(self) -> None:
        with writing(self.folder, "the folder is unchanged"):
            self._path(self.rank).write_text(self.token, encoding="utf-8")

    def answer(self) -> dict[str, Any]:
        """The place of this rank and, if its folder is not that of rank 0, the problem."""
        place = {"rank": self.rank, "host": socket.gethostname(), "folder": str(self.folder.resolve())}
        if not self._finds(0):
            return place | {"problem": "does not contain what rank 0 wrote there"}
        try:
            self.write()
        except OSError as error:
            return place | {"problem": f"cannot be written ({error.strerror})"}
        return place | {"problem": None}

    def missing(self, answers: list[dict[str, Any]]) -> str | None:
        """On rank 0: a sentence about the first rank that has another folder; None if all have this one."""
        for answer in answers[1:]:
            problem = answer["problem"]
            if problem is None and not self._finds(answer["rank"]):
                problem = "contains files that rank 0 does not see"
            if problem is not None:
                return (
                    f"the ranks do not share the run's folder: {answer['folder']} on {answer['host']} (rank "
                    f"{answer['rank']}) {problem} ({answers[0]['folder']} on {answers[0]['host']}): "
                    "set --out to a path on a disk that all nodes share, the same on every node."
                )
        return None

    def remove(self) -> None:
        with suppress(OSError):
            self._path(self.rank).unlink(missing_ok=True)

    def _path(self, rank: int) -> Path:
        return self.folder / f"{UNFINISHED}probe-{self.token}-{rank}"

    def _finds(self, rank: int) -> bool:
        """Whether the file of a rank appears within `MAX_SECONDS_FOR_A_FILE` seconds."""
        until = time.monotonic() + MAX_SECONDS_FOR_A_FILE
        while True:
            with suppress(OSError):
                if self._path(rank).read_text(encoding="utf-8") == self.token:
                    return True
            if time.monotonic() > until:
                return False
            time.sleep(POLL_SECONDS)
