"""Who is still there: every rank says so once a second, and one that falls silent is named to the others.

A collective operation whose partner has died fails at once on some transports and never on others. So each rank writes
a beat to the store that torchrun keeps, and watches the next rank's. Whoever finds a rank silent or failed says which
one it was and ends its own process, which ends the job within `patience` seconds; torchrun may then start it again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from residua.distributed.mesh import job_store

BEAT = 1.0
# Beats that must be missed before a rank that a collective has already failed on is called dead.
MISSED = 4


class Pulse:
    """This rank's beat, and a watch over the others."""

    def __init__(self, rank: int, size: int, patience: float, advice: str) -> None:
        self.rank, self.size, self.patience, self.advice = rank, size, patience, advice
        self.done = 0
        self._noticed = 0.0
        self._speaks = True
        # its own connection: the process group's is busy while a collective waits
        self._store = job_store("pulse", timedelta(seconds=30))
        self._beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="residua-pulse", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank is about to end, and why."""
        self._store.set(f"failed/{self.rank}", reason)

    def stop(self, *, finished: bool) -> None:
        """End the beat; a rank that `finished` is not missed."""
        if finished:
            self._store.set(f"failed/{self.rank}", "")
        self._stopped.set()

    def outlast(self, rank: int) -> None:
        """Wait in silence until a rank that is about to end has: its beat stops, or the store it kept is gone.

        It may still have to notice why this one ends; longer than that takes nobody waits.
        """
        self._speaks = False
        until, beat, heard = time.monotonic() + 3 * MISSED * BEAT, "", time.monotonic()
        while time.monotonic() < min(until, heard + 2 * BEAT):
            try:
                now = self._read(rank)
            except (RuntimeError, dist.DistError):
                return
            beat, heard = now, time.monotonic() if now != beat else heard
            time.sleep(BEAT / 10)

    def who_died(self) -> str | None:
        """After a collective failed: the rank that is gone, in words, or None if all are there."""
        self._stopped.set()
        self._thread.join()
        before = {rank: self._read(rank) for rank in range(self.size) if rank != self.rank}
        for _ in range(MISSED):
            for rank in before:
                if reason := self._failure(rank):
                    return self._sentence(rank, f"failed: {reason}")
            self._beat()
            time.sleep(BEAT)
        silent = [rank for rank, beat in before.items() if beat == self._read(rank)]
        return self._sentence(silent[0], "died") if silent else None

    def _run(self) -> None:
        watched = (self.rank + 1) % self.size
        beat, heard = self._read(watched), time.monotonic()
        while not self._stopped.wait(BEAT):
            try:
                self._beat()
                now = self._read(watched)
                reasons = {rank: reason for rank in range(self.size) if (reason := self._failure(rank))}
            except (RuntimeError, dist.DistError):
                self._end("the store that torchrun keeps is gone, and with it the machine of rank 0")
                return
            if now != beat or self._finished(watched):
                beat, heard = now, time.monotonic()
            if reasons and self._overdue():
                rank, reason = next(iter(reasons.items()))
                self._end(self._sentence(rank, f"failed: {reason}"))
            elif time.monotonic() - heard > self.patience:
                self._store.set(f"failed/{watched}", f"it was silent for {self.patience:.0f} seconds")

    def _overdue(self) -> bool:
        """Whether the main thread has had its time to notice a failure itself."""
        self._noticed = self._noticed or time.monotonic()
        return time.monotonic() - self._noticed > 2 * MISSED * BEAT

    def _end(self, sentence: str) -> None:
        if not self._speaks:
            return
        print(f"residua: {sentence}; {self.advice}.", file=sys.stderr, flush=True)
        os._exit(1)

    def _beat(self) -> None:
        beat = {"time": time.time(), "step": self.done, "host": socket.gethostname(), "process": os.getpid()}
        self._store.set(f"beat/{self.rank}", json.dumps(beat))

    def _read(self, rank: int) -> str:
        return self._store.get(f"beat/{rank}").decode() if self._store.check([f"beat/{rank}"]) else ""

    def _failure(self, rank: int) -> str:
        key = f"failed/{rank}"
        return self._store.get(key).decode() if rank != self.rank and self._store.check([key]) else ""

    def _finished(self, rank: int) -> bool:
        return self._store.check([f"failed/{rank}"])

    def _sentence(self, rank: int, what: str) -> str:
        beat = json.loads(self._read(rank) or "{}")
        where = f" (process {beat['process']} on {beat['host']})" if beat else ""
        return f"rank {rank}{where} {what}, last heard of after step {beat.get('step', 0)}"


LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "gloo", "nccl", "socket", "connect")


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error says that another process stopped answering."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in words for w in LOST))
