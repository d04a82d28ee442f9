"""Heartbeats: every rank reports once a second that it is alive, and a silent or failed rank is named to the others.

A collective whose partner has died fails at once on some transports and hangs forever on others. So every rank runs a
thread that does two things per beat, through the key-value store of the job:

1. It writes its own beat: the time, the last finished step, host and process.
2. It reads the beat of the next rank and the list of failures. The ranks form a ring, so every rank, rank 0 too, is
   watched by one other. The list is one key that all ranks share. A rank that fails adds itself to it. A rank that has
   been silent for `patience` seconds is added by the one that watches it; after a failed collective, by any other.

When the list names another rank, the training thread gets a few seconds to notice the failure itself (`who_died`).
Otherwise the heartbeat thread prints a sentence that names the rank and ends the process. torchrun may then start the
job again. One rank of each node speaks: the first that claims the voice of its node. Where rank 0 is and a rank said
itself why it fails, that is rank 0.

torchrun sends SIGTERM to the ranks of a node when one of them has ended, and SIGKILL 30 seconds later. A rank that
hears SIGTERM therefore calls a silent rank dead sooner (`HURRIED_BEATS`).

A beat costs a rank three store requests, however many ranks there are.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch.distributed as dist

BEAT_SECONDS = 1.0
"""Seconds between beats."""

MISSED_BEATS = 4
"""Beats that a rank must miss before it is called dead, after a collective has failed."""

HURRIED_BEATS = 3 * MISSED_BEATS
"""Beats that a rank may miss once torchrun has asked this one to end: it must speak within 30 seconds."""

FAILURES = "failures"
"""The shared key: one line of JSON per failure, oldest first."""

STORE_GONE = "torchrun's store is gone, so the machine of rank 0 is probably down"


@dataclass(frozen=True)
class Failure:
    """A rank that failed, in a sentence; `explained` if it gave the reason itself."""

    rank: int
    explained: bool
    sentence: str


class Heartbeat:
    """The heartbeat of this rank, and its watch over the others.

    `store` needs a connection of its own: that of the process group is busy while a collective waits. `node` is the
    ranks of this machine, all by default. `advice` ends every sentence that is printed. `done` is the last step that
    this rank has finished, `common` the last that all have; the trainer updates both. `record` writes down what this
    rank was doing, and returns a clause that says where; it is called before this rank ends, and once when no step was
    finished for `stall` seconds.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        patience: float,
        advice: str,
        *,
        node: Sequence[int] | None = None,
        record: Callable[[], str] = lambda: "",
        stall: float = inf,
    ) -> None:
        self.rank, self.size, self.patience, self.advice = rank, size, patience, advice
        self.node = range(size) if node is None else node
        self.record, self.stall = record, stall
        self.done = self.common = 0
        self._seen_done, self._moved = 0, time.monotonic()
        self._store = store
        self._watched = (rank + 1) % size
        self._last_beat, self._last_heard = "", time.monotonic()
        self._noticed: float | None = None
        self._failure: Failure | None = None
        self._voice: bool | None = None
        self._asked_to_end = False
        self._may_end = True
        self._append("")  # reading a missing key would wait for it
        self._write_beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="residua-heartbeat", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank is about to end, and why."""
        with suppress(RuntimeError):  # without a store the others end anyway
            self._claim_voice(explained=True)
            self._add_failure(self.rank, f"failed: {reason}", explained=True)

    @property
    def speaks(self) -> bool:
        """Whether this rank says on its node why the job ends; known after `fail` and `who_died`."""
        return self._voice is not False

    @property
    def explained(self) -> bool:
        """Whether the rank that failed gave its reason itself; known after `who_died`."""
        return self._failure is not None and self._failure.explained

    def hurry(self) -> None:
        """torchrun has asked this rank to end, maybe because another has: do not wait long for a silent one."""
        self.patience = min(self.patience, HURRIED_BEATS * BEAT_SECONDS)

    def end_soon(self, *_: object) -> None:
        """Name a rank that has died, if one has, and end: a handler of SIGTERM where the run cannot be saved."""
        self._asked_to_end = True

    def stop(self, *, finished: bool) -> None:
        """Stop beating; a rank that has `finished` is not missed."""
        self._stopped.set()
        if finished:
            self._may_end = False
            self._thread.join()
            with suppress(RuntimeError):  # rank 0 may have finished first, and its store with it
                self._write_beat(finished=True)

    def outlast(self, rank: int) -> None:
        """Wait silently until `rank`, which is about to end, has ended: its beat stops or its store is gone.

        That rank may not have noticed yet that it must end. Waits at most 12 s.
        """
        self._may_end = False
        start = news = time.monotonic()
        last = ""
        while time.monotonic() < min(start + 3 * MISSED_BEATS * BEAT_SECONDS, news + MISSED_BEATS * BEAT_SECONDS):
            try:
                beat = self._read_beats([rank]).get(rank, "")
            except RuntimeError:
                return
            if beat != last:
                last, news = beat, time.monotonic()
            time.sleep(BEAT_SECONDS / 4)

    def who_died(self) -> str | None:
        """After a failed collective: a sentence that names the rank that died or failed; None if all are alive."""
        self._stopped.set()
        self._thread.join()
        return self._find_dead()

    def _find_dead(self) -> str | None:
        try:
            if self._failure is None:
                self._look_for_dead()
        except RuntimeError:
            return STORE_GONE if self._failure is None else self._failure.sentence
        return None if self._failure is None else self._failure.sentence

    def _look_for_dead(self) -> None:
        """Wait for a reported failure, then for beats; report a rank that is found dead to the others."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        before = self._read_beats(others)
        for _ in range(MISSED_BEATS):
            if self._first_failure(self._store.get(FAILURES)):
                return
            self._write_beat()
            time.sleep(BEAT_SECONDS)
        now = self._read_beats(others)
        silent = [rank for rank in others if before.get(rank) == now.get(rank) and not _finished(now.get(rank, ""))]
        if silent:
            self._add_failure(silent[0], "died")
            self._first_failure(self._store.get(FAILURES))  # another rank may have found another one first
            if len(self.node) < self.size:
                time.sleep(2 * BEAT_SECONDS)  # the other nodes read it in a store that may end with this rank

    def tick(self) -> None:
        """One beat: write this rank's, look at the next rank's and at the list of failures."""
        self._notice_stall()
        if self._asked_to_end and self._may_end:
            self._leave()
        try:
            self._write_beat()
            self._watch()
        except RuntimeError:
            self._end(STORE_GONE if self._failure is None else self._failure.sentence, silent=not self.speaks)

    def _leave(self) -> None:
        """End because torchrun asked for it: name the dead rank that it may have been for."""
        sentence = self._find_dead()
        if sentence is not None:
            self._end(sentence, silent=not self.speaks)
        elif self._may_end:
            self.fail("it received a signal to end")
            os._exit(128 + signal.SIGTERM)

    def _notice_stall(self) -> None:
        """Record once that training stands still, while every rank is alive; the first step may compile for long."""
        now = time.monotonic()
        if self.done != self._seen_done or self.done == 0:
            self._seen_done, self._moved = self.done, now
        elif now - self._moved > self.stall:
            where, self._moved = self.record(), inf
            if self.rank == 0:
                self._print(f"no step finished within {self.stall:.0f} seconds after step {self.done}{where}")

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            self.tick()

    def _watch(self) -> None:
        beat, failure = self._look()
        if beat != self._last_beat or _finished(beat):
            self._last_beat, self._last_heard = beat, time.monotonic()
        if failure is not None:
            silent, now = not self.speaks, time.monotonic()
            self._noticed = now if self._noticed is None else self._noticed
            if (
                now - self._noticed > (2 * MISSED_BEATS + MISSED_BEATS * silent) * BEAT_SECONDS
            ):  # the training thread has had its time
                self._end(failure.sentence, silent=silent)
        elif time.monotonic() - self._last_heard > self.patience:
            self._add_failure(self._watched, f"failed: it sent nothing for {self.patience:.0f} seconds")

    def _look(self) -> tuple[str, Failure | None]:
        """The beat of the watched rank, empty if there was none yet, and the first failure, if there was any."""
        key = f"beat/{self._watched}"
        keys = [FAILURES, key] if self._store.check([key]) else [FAILURES]
        failures, *beats = self._store.multi_get(keys)
        return (beats[0].decode() if beats else ""), self._first_failure(failures)

    def _end(self, sentence: str, *, silent: bool = False) -> None:
        if not self._may_end:
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

    def _add_failure(self, rank: int, how: str, *, explained: bool = False) -> None:
        step = self.done if rank == self.rank else self.common
        self._append(json.dumps({"rank": rank, "how": how, "explained": explained, "step": step}) + "\n")

    def _append(self, text: str) -> None:
        self._store.append(FAILURES, text)  # type: ignore[attr-defined]  # missing in PyTorch's type stubs

    def _first_failure(self, lines: bytes) -> Failure | None:
        """The first rank but this one that failed. It is remembered: the store may be gone when it is to be named."""
        others = [failure for failure in map(json.loads, lines.splitlines()) if failure["rank"] != self.rank]
        if self._failure is None and others:
            rank, explained, step = others[0]["rank"], others[0]["explained"], others[0]["step"]
            self._failure = Failure(rank, explained, self._sentence(rank, others[0]["how"], step))
            self._claim_voice(explained=explained)
        return self._failure

    def _claim_voice(self, *, explained: bool) -> None:
        """Decide once whether this rank speaks for its node."""
        if self._voice is None and explained and 0 in self.node:
            self._voice = self.rank == 0
        elif self._voice is None:
            self._voice = self._store.add(f"voice/{self.node[0]}", 1) == 1

    def _sentence(self, rank: int, how: str, step: int) -> str:
        """The rank with its process and host, and the last step that anyone knows it to have finished."""
        beat = json.loads(self._read_beats([rank]).get(rank, "{}"))
        where = f" (process {beat['process']} on {beat['host']})" if beat else ""
        return f"rank {rank}{where} {how}, last heard of after step {max(step, self.common, beat.get('step', 0))}"


def _finished(beat: str) -> bool:
    return bool(beat) and json.loads(beat)["finished"]


LOST_PEER_WORDS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out",
    "timeout",
    "gloo",
    "nccl",
    "socket",
    "connect",
)


def lost_a_peer(error: BaseException) -> bool:
    """Whether an error says that another process stopped answering."""
    words = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in words for w in LOST_PEER_WORDS)
    )


class Terminations:
    """From here on SIGTERM ends this rank only after its heartbeat thread has looked for a rank that died.

    `train` handles it itself while it can save the run (`StopSignals`). Python runs handlers in the main thread, which
    may wait in a collective; so a byte in a pipe tells the heartbeat thread at once.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if not self._main:
            return
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        self._previous: Any = signal.signal(signal.SIGTERM, heartbeat.end_soon)
        self._wakeup = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._pipe = writes
        threading.Thread(target=_listen, args=(reads, heartbeat), name="residua-signals", daemon=True).start()

    def ignore(self) -> None:
        """This rank is ending anyway."""
        if self._main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        """As it was before."""
        if self._main:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGTERM, self._previous)
            os.close(self._pipe)


def _listen(reads: int, heartbeat: Heartbeat) -> None:
    """Hurry the heartbeat for every SIGTERM, until the other end of the pipe is closed."""
    with suppress(OSError):
        while number := os.read(reads, 1):
            if number[0] == signal.SIGTERM:
                heartbeat.hurry()
    os.close(reads)
