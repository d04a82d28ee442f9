"""Heartbeats: every rank reports once a second that it is alive, so the others can name a silent or failed rank.

A collective whose partner has died fails at once on some transports and hangs forever on others. So every rank runs a
thread that does two things per beat, through the key-value store of the job:

1. It writes its own beat: the time, the last finished step, host and process.
2. It reads the beat of the next rank and the list of failures. The ranks form a ring, so one other rank watches each
   rank, rank 0 included. The list is one key that all ranks share. A rank that fails adds itself to it. A rank that has
   been silent for `patience` seconds is added by its watcher or, after a failed collective, by any rank.

When the list names another rank, the training thread gets a few seconds to notice the failure itself (`who_died`).
Otherwise the heartbeat thread prints a sentence that names the rank and ends the process. torchrun may then restart the
job. One rank per node prints the message: the first to claim it. If a rank gave the reason for its failure itself,
rank 0 prints it on its node.

torchrun sends SIGTERM to the ranks of a node when one of them has ended, and SIGKILL 30 seconds later. A rank that
receives SIGTERM therefore declares a silent rank dead sooner (`HURRIED_BEATS`).

A beat costs a rank three store requests, regardless of the number of ranks.
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
MISSED_BEATS = 4
"""Missed beats after which a rank is declared dead once a collective has failed."""

HURRIED_BEATS = 3 * MISSED_BEATS
"""Missed beats allowed once torchrun has asked this rank to end: it must report within 30 seconds."""

FAILURES = "failures"
"""The shared key: one line of JSON per failure, oldest first."""

STORE_GONE = "torchrun's store is gone, so the machine of rank 0 is probably down"


@dataclass(frozen=True)
class Failure:
    """A sentence about a rank that failed; `explained` if the rank gave the reason itself."""

    rank: int
    explained: bool
    sentence: str


class Heartbeat:
    """The heartbeat of this rank, and its watch over the others.

    `store` needs a separate connection: that of the process group is busy while a collective waits. `node` holds the
    ranks of this machine, by default all ranks. `advice` ends every printed sentence. `done` is the last step that this
    rank has finished, `common` the last that all have; the trainer updates both. `record` writes what this rank was
    doing to a file, and returns a clause that says where. It is called before this rank ends, and once when no step has
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
        self._append("")  # reading a missing key would block
        self._write_beat()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="residua-heartbeat", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """Tell the others that this rank is about to end, and why."""
        with suppress(RuntimeError):  # if the store is gone, the others end anyway
            self._claim_voice(explained=True)
            self._add_failure(self.rank, f"failed: {reason}", explained=True)

    @property
    def speaks(self) -> bool:
        """Whether this rank prints on its node why the job ends; known after `fail` or `who_died`."""
        return self._voice is not False

    @property
    def explained(self) -> bool:
        """Whether the rank that failed gave its reason itself; known after `who_died`."""
        return self._failure is not None and self._failure.explained

    def hurry(self) -> None:
        """Wait less for a silent rank: torchrun has asked this one to end, perhaps because another has ended."""
        self.patience = min(self.patience, HURRIED_BEATS * BEAT_SECONDS)

    def end_soon(self, *_: object) -> None:
        """SIGTERM handler for when the run cannot be saved: name a rank that has died, if any, and exit."""
        self._asked_to_end = True

    def stop(self, *, finished: bool) -> None:
        """Stop beating; a rank that has `finished` is not reported as silent."""
        self._stopped.set()
        if finished:
            self._may_end = False
            self._thread.join()
            with suppress(RuntimeError):  # rank 0 may have finished first and taken its store down
                self._write_beat(finished=True)

    def outlast_leader(self) -> None:
        """Wait silently, at most 12 s, until rank 0 has ended, which may not know yet that it must end.

        Then its beat stops, or its store is gone.
        """
        self._may_end = False
        start = news = time.monotonic()
        last = ""
        while time.monotonic() < min(start + 3 * MISSED_BEATS * BEAT_SECONDS, news + MISSED_BEATS * BEAT_SECONDS):
            try:
                beat = self._read_beats([0]).get(0, "")
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
        """Wait for a reported failure, then for beats; report a dead rank to the others."""
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
            self._first_failure(self._store.get(FAILURES))  # another rank may have reported a different one first
            if len(self.node) < self.size:
                time.sleep(2 * BEAT_SECONDS)  # the store may end with this rank; give other nodes time to read it

    def tick(self) -> None:
        """One beat: write this rank's, look at the next rank's and at the list of failures."""
        self._notice_stall()
        if self._asked_to_end and self._may_end:
            self._leave()
        try:
            self._write_beat()
            self._watch()
        except RuntimeError:
            self._end(STORE_GONE if self._failure is None else self._failure.sentence)

    def _leave(self) -> None:
        """End because torchrun asked for it; name the dead rank that may have been the cause."""
        sentence = self._find_dead()
        if sentence is not None:
            self._end(sentence)
        elif self._may_end:
            self.fail("it received a signal to end")
            os._exit(128 + signal.SIGTERM)

    def _notice_stall(self) -> None:
        """Record once that training has stalled although all ranks live; the first step may take long to compile."""
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
            now = time.monotonic()
            self._noticed = now if self._noticed is None else self._noticed
            # the training thread had time to react
            if now - self._noticed > (2 if self.speaks else 3) * MISSED_BEATS * BEAT_SECONDS:
                self._end(failure.sentence)
        elif time.monotonic() - self._last_heard > self.patience:
            self._add_failure(self._watched, f"failed: it sent nothing for {self.patience:.0f} seconds")

    def _look(self) -> tuple[str, Failure | None]:
        """The beat of the watched rank, empty if there is none yet, and the first failure, if any."""
        key = f"beat/{self._watched}"
        keys = [FAILURES, key] if self._store.check([key]) else [FAILURES]
        failures, *beats = self._store.multi_get(keys)
        return (beats[0].decode() if beats else ""), self._first_failure(failures)

    def _end(self, sentence: str) -> None:
        if not self._may_end:
            self._stopped.set()
            return
        where = self.record()
        if self.speaks:
            self._print(f"{sentence}{where}; {self.advice}")
        os._exit(1)

    def _print(self, words: str) -> None:
        with suppress(OSError):  # standard error may go to a full disk
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
        """The first other rank that failed. It is remembered, because the store may be gone when it must be named."""
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
        """A sentence with the rank's process and host, and the last step that it is known to have finished."""
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
    """While installed, SIGTERM ends this rank only after its heartbeat thread has looked for a rank that died.

    `train` handles SIGTERM itself while it can save the run (`StopSignals`). Python runs handlers in the main thread,
    which may be waiting in a collective, so a byte in a pipe notifies the heartbeat thread at once.
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
        """Ignore SIGTERM: this rank is already ending."""
        if self._main:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def restore(self) -> None:
        """Restore the previous signal handling."""
        if self._main:
            signal.set_wakeup_fd(self._wakeup)
            signal.signal(signal.SIGTERM, self._previous)
            os.close(self._pipe)


def _listen(reads: int, heartbeat: Heartbeat) -> None:
    """Call `hurry` for every SIGTERM, until the other end of the pipe is closed."""
    with suppress(OSError):
        while number := os.read(reads, 1):
            if number[0] == signal.SIGTERM:
                heartbeat.hurry()
    os.close(reads)
