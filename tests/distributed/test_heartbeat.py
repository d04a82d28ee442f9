"""Heartbeats of simulated ranks in one process: a fake clock, a store that counts requests, no waiting."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from residua.distributed import heartbeat
from residua.distributed.heartbeat import HURRIED_BEATS, MISSED_BEATS, Heartbeat, Terminations, lost_a_peer

PATIENCE = 10


class CountingStore:
    """A store in memory that counts requests, and can be lost."""

    def __init__(self) -> None:
        self.store, self.requests, self.lost = dist.HashStore(), 0, False

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        if self.lost:
            raise dist.DistNetworkError("connection closed by peer")
        return getattr(self.store, name)


class Ended(Exception):
    """Stands for the end of a process."""


class Job:
    """Ranks with sleeping heartbeat threads: `second` lets each living rank beat once, in order."""

    def __init__(self, ranks: int, per_node: int) -> None:
        self.store, self.now = CountingStore(), 100.0
        self.alive: dict[int, Heartbeat] = {}
        for rank in range(ranks):
            first = rank - rank % per_node
            node = range(first, min(ranks, first + per_node))
            self.alive[rank] = Heartbeat(self.store, rank, ranks, PATIENCE, "do this", node=node)  # type: ignore[arg-type]

    def second(self) -> set[int]:
        """A second passes; returns the ranks that end in it."""
        self.now += 1
        ended = set()
        for rank, heart in list(self.alive.items()):
            try:
                heart.tick()
            except Ended:
                ended.add(rank)
                del self.alive[rank]
        return ended

    def seconds(self, count: int) -> list[int]:
        """So many pass; returns the ranks that end, in order."""
        return [rank for _ in range(count) for rank in sorted(self.second())]

    def kill(self, *ranks: int) -> None:
        """After a second, these are silent."""
        self.second()
        for rank in ranks:
            del self.alive[rank]

    def seconds_until_an_end(self, limit: int = 100) -> int:
        """Seconds until the first rank ends; the others must end within five more."""
        for passed in range(1, limit):
            if self.second():
                self.seconds(MISSED_BEATS + 1)
                assert not self.alive
                return passed
        raise AssertionError("no rank ended")

    def sleep(self, seconds: float) -> None:
        """The others beat while a rank sleeps."""
        before = int(self.now)
        self.now += seconds
        for _ in range(int(self.now) - before):
            for heart in self.alive.values():
                heart.tick()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[Job] = []

    class Clock:
        monotonic = time = staticmethod(lambda: made[-1].now if made else 100.0)
        sleep = staticmethod(lambda seconds: made[-1].sleep(seconds))

    def end(code: int) -> None:
        assert code in (1, 128 + signal.SIGTERM)
        raise Ended

    monkeypatch.setattr(heartbeat, "time", Clock)
    monkeypatch.setattr(heartbeat.os, "_exit", end)
    # the threads wait for their first beat as long as the test takes
    monkeypatch.setattr(heartbeat.Heartbeat, "_run", lambda heart: heart._stopped.wait())

    def make(ranks: int, per_node: int = 100) -> Job:
        made.append(Job(ranks, per_node))
        return made[-1]

    yield make
    for heart in made[-1].alive.values():
        heart.stop(finished=False)


@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_a_beat_costs_three_requests_at_any_number_of_ranks(job: Any, ranks: int) -> None:
    simulated = job(ranks)
    simulated.store.requests = 0
    assert not simulated.seconds(10)
    assert simulated.store.requests <= 3 * ranks * 10


def test_requests_of_running_threads_grow_linearly_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with real threads: requests per beat, so that a slow machine changes nothing."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    store, ranks = CountingStore(), 16
    beats = 0
    write = Heartbeat._write_beat

    def count(heart: Heartbeat, **settings: Any) -> None:
        nonlocal beats
        beats += 1
        write(heart, **settings)

    monkeypatch.setattr(Heartbeat, "_write_beat", count)
    hearts = [Heartbeat(store, rank, ranks, 60, "") for rank in range(ranks)]  # type: ignore[arg-type]
    while beats < 10 * ranks:
        time.sleep(0.01)
    for heart in hearts:
        heart.stop(finished=True)
    assert store.requests <= 4 * beats


@pytest.mark.parametrize(("silent", "nodes"), [(0, 3), (2, 3), (4, 2)])
def test_a_silent_rank_is_named_once_per_node(job: Any, silent: int, nodes: int, capsys: Any) -> None:
    """Also rank 0; rank 4 is alone on its node. The others end once their training threads had time to notice."""
    simulated = job(5, per_node=2)
    simulated.alive[silent].done = 7
    simulated.kill(silent)
    assert simulated.seconds_until_an_end() <= PATIENCE + 2 * MISSED_BEATS + 4
    said = capsys.readouterr().err.splitlines()
    assert len(said) == nodes
    for line in said:
        assert line.startswith(f"residua: rank {silent} (process ")
        assert line.endswith("failed: it sent nothing for 10 seconds, last heard of after step 7; do this.")


@pytest.mark.parametrize("dead", [{2, 3}, {0, 1}, {4, 0}, {1, 3}, {0, 1, 2, 3}])
def test_one_of_several_ranks_that_die_together_is_named(job: Any, dead: set[int], capsys: Any) -> None:
    """The rank before a dead one in the ring may be dead too; the rank before the first dead one is alive."""
    simulated = job(5)
    simulated.kill(*dead)
    assert simulated.seconds_until_an_end() <= PATIENCE + 2 * MISSED_BEATS + 4
    (said,) = capsys.readouterr().err.splitlines()
    assert said.split(" (process ")[0] in {f"residua: rank {rank}" for rank in dead}


def test_a_dead_rank_is_reported_with_its_last_known_step(job: Any) -> None:
    """It beats once a second, and steps may be shorter: the others know of those that they finished together."""
    simulated = job(3)
    simulated.alive[2].done = 9
    simulated.kill(2)
    asking = simulated.alive.pop(0)
    asking.common = 13
    assert asking.who_died().endswith("died, last heard of after step 13")
    assert simulated.alive.pop(1).who_died().endswith("died, last heard of after step 13")


def test_the_first_dead_rank_is_named_not_its_victims(job: Any) -> None:
    """A collective may fail late on a rank: only when the rank that waited with it has ended."""
    simulated = job(4)
    simulated.kill(3)
    for rank in (0, 1, 2):
        assert simulated.alive.pop(rank).who_died().startswith("rank 3 ")


def test_other_nodes_name_a_dead_rank_after_the_store_is_gone(job: Any, capsys: Any) -> None:
    """The store ends with the agent of the node where the rank died and was named."""
    simulated = job(4, per_node=2)
    simulated.kill(0)
    assert simulated.alive.pop(1).who_died().startswith("rank 0 ")
    simulated.store.lost = True
    simulated.second()
    assert capsys.readouterr().err.count("residua: rank 0 ") == 1 and not simulated.alive


def test_a_terminated_rank_first_names_a_dead_one(job: Any, capsys: Any) -> None:
    """torchrun asks all ranks to end when one has died; it kills those that have not ended after 30 seconds."""
    simulated = job(3)
    for heart in simulated.alive.values():
        heart.patience = 600
    simulated.kill(1)
    simulated.alive[0].hurry()
    assert simulated.seconds_until_an_end() < 25
    assert capsys.readouterr().err.count("residua: rank 1 (process ") == 1


@pytest.mark.parametrize("died", [True, False])
def test_a_rank_that_cannot_save_ends_on_request(job: Any, died: bool, capsys: Any) -> None:
    simulated = job(3)
    simulated.kill(*[1] * died)
    asked = simulated.alive.pop(0)
    asked.end_soon()
    with pytest.raises(Ended):
        asked.tick()
    assert simulated.now < 100 + 2 * MISSED_BEATS
    assert capsys.readouterr().err.count("residua: rank 1 (process ") == died
    asked.stop(finished=False)


def test_a_rank_that_fails_is_named_once_with_its_reason(job: Any, capsys: Any) -> None:
    """By rank 0; the others give it time, because torchrun ends all when the first one ends."""
    simulated = job(4)
    simulated.alive.pop(1).fail("the disk is full")
    assert simulated.seconds(3 * MISSED_BEATS + 2) == [0, 2, 3]
    said = capsys.readouterr().err
    assert said.count("residua: rank 1 (process ") == said.count("failed: the disk is full, last heard of") == 1


def test_a_failure_of_rank_0_is_repeated_only_on_other_nodes(job: Any, capsys: Any) -> None:
    simulated = job(5, per_node=2)
    simulated.alive.pop(0).fail("the disk is full")
    simulated.seconds(3 * MISSED_BEATS + 2)
    said = capsys.readouterr().err.splitlines()
    assert not simulated.alive and len(said) == 2 and all("rank 0 (process" in line for line in said)


def test_the_first_of_several_failures_is_named(job: Any, capsys: Any) -> None:
    simulated = job(3)
    simulated.alive.pop(2).fail("first")
    simulated.alive.pop(1).fail("second")
    simulated.seconds(3 * MISSED_BEATS)
    assert "failed: first" in (said := capsys.readouterr().err) and "second" not in said


def test_a_finished_rank_is_not_reported_dead(job: Any) -> None:
    simulated = job(3)
    simulated.alive.pop(1).stop(finished=True)
    assert not simulated.seconds(3 * PATIENCE)


def test_a_lost_store_is_reported_by_every_rank_and_ends_it(job: Any, capsys: Any) -> None:
    simulated = job(2)
    simulated.store.lost = True
    assert simulated.seconds_until_an_end() == 1
    assert capsys.readouterr().err.count("residua: torchrun's store is gone") == 2


def test_a_finished_or_failed_rank_does_not_need_the_store(job: Any) -> None:
    """Rank 0 may have ended before it, and the store with it."""
    simulated = job(2)
    simulated.store.lost = True
    simulated.alive[0].fail("for a reason of its own")
    simulated.alive[1].stop(finished=True)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_failed_collective_names_the_dead_rank(job: Any, dead: int) -> None:
    simulated = job(4)
    simulated.kill(dead)
    asking = simulated.alive.pop(1)
    assert asking.who_died().startswith(f"rank {dead} (process ")
    assert asking.who_died().endswith(" died, last heard of after step 0")


def test_a_failed_collective_does_not_blame_living_ranks(job: Any) -> None:
    simulated = job(3)
    assert simulated.alive.pop(0).who_died() is None
    simulated.store.lost = True
    assert simulated.alive.pop(1).who_died().startswith("torchrun's store is gone")


def test_a_failed_collective_reports_a_known_reason_at_once(job: Any) -> None:
    simulated = job(3)
    simulated.alive.pop(2).fail("its own reason")
    asked = simulated.now
    assert "rank 2" in (said := simulated.alive.pop(0).who_died()) and "failed: its own reason" in said
    assert simulated.now == asked


def test_outlasting_a_rank_ends_with_its_beat_or_after_12_s(job: Any) -> None:
    simulated = job(2)
    waiting, asked = simulated.alive.pop(1), simulated.now
    waiting.outlast_leader()
    assert 12 <= simulated.now - asked < 13
    del simulated.alive[0]
    asked = simulated.now
    waiting.outlast_leader()
    assert MISSED_BEATS <= simulated.now - asked < MISSED_BEATS + 1
    simulated.store.lost = True
    asked = simulated.now
    waiting.outlast_leader()
    assert simulated.now == asked


def test_a_rank_that_outlasts_another_prints_nothing(job: Any, capsys: Any) -> None:
    simulated = job(2)
    simulated.alive[1].outlast_leader()
    simulated.alive.pop(0).fail("said elsewhere")
    assert not simulated.seconds(3 * MISSED_BEATS)
    assert not capsys.readouterr().err


def test_sigterm_goes_to_the_heartbeat_until_restored(job: Any) -> None:
    """torchrun sends it whenever a rank has ended: also between a failed collective and its explanation."""
    heart, heard = job(2).alive[0], []
    heart.patience = 600
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("default"))
    try:
        terminations = Terminations(heart)
        os.kill(os.getpid(), signal.SIGTERM)
        while heart.patience > HURRIED_BEATS:
            time.sleep(0.01)
        assert heart._asked_to_end and not heard
        terminations.ignore()
        os.kill(os.getpid(), signal.SIGTERM)
        terminations.restore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["default"]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (dist.DistNetworkError("anything"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("timeout"), False),
    ],
)
def test_errors_from_a_lost_peer_are_recognised(error: Exception, lost: bool) -> None:
    assert lost_a_peer(error) is lost
