"""Heartbeats: every rank reports once a second that it is alive, and a silent or failed rank is named to the others.

A collective whose partner has died fails at once on some transports and hangs forever on others. So every rank runs a
thread that does two things per beat, through the key-value store of the job:

1. It writes its own beat: the time, the last finished step, host and process.
2. It reads the beat of the next rank and the list of failures. The ranks form a ring, so every rank, rank 0 too, is
   watched by one other. The list is one key that all ranks share. A rank that fails adds itself to it; a rank that has
   been silent for `patience` seconds is added by the rank that watches it.

When the list names another rank, the training thread gets a few seconds to notice the failure itself (`who_died`).
Otherwise the heartbeat thread prints a sentence that names the rank and ends the process. torchrun may then start the
job again. A rank that said itself why it fails is heard once: rank 0 prints the reason, the others end in silence.

A beat costs a rank three store requests, however many ranks there are.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

import torch.distributed as dist

BEAT = 1.0
"""Seconds between beats."""

MISSED = 4
"""Beats that a rank must miss before it is called dead, after a collective has failed."""

FAILURES = "failures"
"""The shared key: one line of JSON per failure, oldest first."""

STORE_GONE = "the store that torchrun keeps is gone, and with it the machine of rank 0"


class Heartbeat:
    """The heartbeat of this rank, and its watch over the others.

    `store` needs a connection of its own: that of the process group is busy while a collective waits.
    `advice` ends every sentence that is printed. `done` is the last finished step; the trainer updates it. `record`
    writes down what this rank was doing, and returns a clause that says where; it is called before this rank ends, and
    once when no step was finished for `stall` seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        patience: float,
        advice: str,
        *,
        record: Callable[[], str] = lambda: "",
        stall: float = inf,
    ) -> None:
        self.rank, self.size, self.patience, self.advice = rank, size, patience, advice
        self.record, self.stall = record, stall
        self.done = 0
        self._seen_done, self._moved = 0, time.monotonic()
        self._store = store
        self._watched = (rank + 1) % size
        self._last_beat, self._last_heard = "", time.monotonic()
        self._noticed: float | None = None
        self._speaks = True
        self.told = False
        """Whether the rank that failed gave its reason itself; known after `who_died`."""
        self._append("")  # reading a missing key would wait for it
        self._write_beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="residua-heartbeat", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank is about to end, and why."""
        with suppress(RuntimeError):  # without a store the others end anyway
            self._add_failure(self.rank, reason, told=True)

    def stop(self, *, finished: bool) -> None:
        """Stop beating; a rank that has `finished` is not missed."""
        self._stopped.set()
        if finished:
            self._speaks = False
            self._thread.join()
            with suppress(RuntimeError):  # rank 0 may have finished first, and its store with it
                self._write_beat(finished=True)

    def outlast(self, rank: int) -> None:
        """Wait silently until `rank`, which is about to end, has ended: its beat stops or its store is gone.

        That rank may not have noticed yet that it must end. Waits at most 12 s.
        """
        self._speaks = False
        start = heard = time.monotonic()
        last = ""
        while time.monotonic() < min(start + 3 * MISSED * BEAT, heard + MISSED * BEAT):
            try:
                beat = self._read_beats([rank]).get(rank, "")
            except RuntimeError:
                return
            if beat != last:
                last, heard = beat, time.monotonic()
            time.sleep(BEAT / 4)

    def who_died(self) -> str | None:
        """After a failed collective: a sentence that names the rank that died or failed; None if all are alive."""
        self._stopped.set()
        self._thread.join()
        try:
            return self._find_dead()
        except RuntimeError:
            return STORE_GONE

    def _find_dead(self) -> str | None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        before = self._read_beats(others)
        for _ in range(MISSED):
            if failure := self._first_failure(self._store.get(FAILURES)):
                return self._sentence(*failure)
            self._write_beat()
            time.sleep(BEAT)
        now = self._read_beats(others)
        silent = [rank for rank in others if before.get(rank) == now.get(rank)]
        return self._sentence(silent[0], "died") if silent else None

    def tick(self) -> None:
        """One beat: write this rank's, look at the next rank's and at the list of failures."""
        self._notice_stall()
        try:
            self._write_beat()
            self._watch()
        except RuntimeError:
            self._end(STORE_GONE)

    def _notice_stall(self) -> None:
        """Record once that training stands still, while every rank is alive; the first step may compile for long."""
        now = time.monotonic()
        if self.done != self._seen_done or self.done == 0:
            self._seen_done, self._moved = self.done, now
        elif now - self._moved > self.stall:
            where, self._moved = self.record(), inf
            if self.rank == 0:
                self._print(f"no step was finished in {self.stall:.0f} seconds after step {self.done}{where}")

    def _run(self) -> None:
        while not self._stopped.wait(BEAT):
            self.tick()

    def _watch(self) -> None:
        beat, failure = self._look()
        if beat != self._last_beat or _finished(beat):
            self._last_beat, self._last_heard = beat, time.monotonic()
        if failure is not None:
            silent = self.told and self.rank > 0
            if self._overdue(2 * MISSED + MISSED * silent):
                self._end(self._sentence(*failure), silent=silent)
        elif time.monotonic() - self._last_heard > self.patience:
            self._add_failure(self._watched, f"it was silent for {self.patience:.0f} seconds")

    def _look(self) -> tuple[str, tuple[int, str] | None]:
        """The beat of the watched rank, empty if there was none yet, and the first failure, if there was any."""
        key = f"beat/{self._watched}"
        keys = [FAILURES, key] if self._store.check([key]) else [FAILURES]
        failures, *beats = self._store.multi_get(keys)
        return (beats[0].decode() if beats else ""), self._first_failure(failures)

    def _overdue(self, beats: int) -> bool:
        """Whether the training thread has had its time to notice a failure itself."""
        now = time.monotonic()
        self._noticed = now if self._noticed is None else self._noticed
        return now - self._noticed > beats * BEAT

    def _end(self, sentence: str, *, silent: bool = False) -> None:
        if not self._speaks:
            self._stopped.set()
            return
        where = self.record()
        if not silent:
            self._print(f"{sentence}{where}; {self.advice}")
        os._exit(1)

    def _print(self, words: str) -> None:
        with suppress(OSError):  # standard error may go to a disk that is full
            print(f"residua: {words}.", file=sys.stderr, flush=True)

    def _write_beat(self, *, finished: bool = False) -> None:
        beat = {"time": time.time(), "step": self.done, "host": socket.gethostname(), "process": os.getpid()}
        self._store.set(f"beat/{self.rank}", json.dumps(beat | {"finished": finished}))

    def _read_beats(self, ranks: list[int]) -> dict[int, str]:
        """The last beat of each of these ranks that has written one."""
        keys = {rank: f"beat/{rank}" for rank in ranks}
        if not self._store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        beats = self._store.multi_get(list(keys.values())) if keys else []
        return {rank: beat.decode() for rank, beat in zip(keys, beats, strict=True)}

    def _add_failure(self, rank: int, reason: str, *, told: bool = False) -> None:
        self._append(json.dumps({"rank": rank, "reason": reason, "told": told}) + "\n")

    def _append(self, text: str) -> None:
        self._store.append(FAILURES, text)  # type: ignore[attr-defined]  # missing in PyTorch's type stubs

    def _first_failure(self, lines: bytes) -> tuple[int, str] | None:
        """The first rank but this one that failed, and how."""
        failures = [json.loads(line) for line in lines.splitlines()]
        others = [failure for failure in failures if failure["rank"] != self.rank]
        if not others:
            return None
        self.told = others[0]["told"]
        return others[0]["rank"], f"failed: {others[0]['reason']}"

    def _sentence(self, rank: int, what: str) -> str:
        beat = json.loads(self._read_beats([rank]).get(rank, "{}"))
        where = f" (process {beat['process']} on {beat['host']})" if beat else ""
        return f"rank {rank}{where} {what}, last heard of after step {beat.get('step', 0)}"


def _finished(beat: str) -> bool:
    return bool(beat) and json.loads(beat)["finished"]


LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "gloo", "nccl", "socket", "connect")


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error says that another process stopped answering."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in words for w in LOST))
