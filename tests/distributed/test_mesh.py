"""The store in which the ranks of a job meet, the parts they build their share from, and reports of slow ranks."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import residua
from residua.distributed import mesh, nodes
from residua.distributed.world import slow_ranks
from residua.train.start import starting_parts
from residua.train.timing import Stopwatch
from tests.distributed.cases import run_config

LIMIT = timedelta(seconds=60)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The store of rank 0 in a job without torchrun; it listens on a port that was free a moment ago."""
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(mesh, "_served", [])
    for _ in range(20):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        try:
            return mesh.job_store("group", LIMIT)
        except dist.DistNetworkError:  # another process has taken the port since
            continue
    raise AssertionError("no free port in 20 attempts")


def test_rank_0_serves_the_store_without_torchrun(served: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    served.set("address", "of rank 0")
    monkeypatch.setenv("RANK", "1")
    assert mesh.job_store("group", LIMIT).get("address") == b"of rank 0"
    monkeypatch.setenv("RANK", "0")
    mesh.job_store("heartbeat", LIMIT)
    assert len(mesh._served) == 1


def test_stores_of_different_names_are_separate(served: dist.Store, monkeypatch: Any) -> None:
    served.set("address", "of a process")
    monkeypatch.setenv("RANK", "1")
    assert not mesh.job_store("heartbeat", LIMIT).check(["address"])


@pytest.mark.parametrize("counts", [(1, 1), (0, 1), (1, 0), (0, 0)], ids=str)
def test_restarts_ignore_what_earlier_starts_left_in_the_store(counts: tuple[int, int]) -> None:
    """torchrun counts the restarts of each node separately: (0, 1) after one, (0, 0) when a new node has joined."""
    store = dist.HashStore()
    first = starting(store, (0, 0))
    assert first[0] == first[1] and not first[0].again
    store.set("here/1", "of-a-dead-process 0")
    second = starting(store, counts)
    assert second[0] == second[1] and second[0].again
    assert second[0].name != first[0].name


def starting(store: dist.Store, counts: tuple[int, int]) -> list[nodes.Start]:
    """The two processes of one start, here threads; rank 0 comes first."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(nodes.meet, store, 0, 2, counts[0])
        time.sleep(0.1)
        second = pool.submit(nodes.meet, store, 1, 2, counts[1])
        return [first.result(), second.result()]


def test_a_probe_finds_ranks_that_do_not_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 shares the folder, rank 2 has another one, rank 3 sees the folder and writes into a copy of it."""
    monkeypatch.setattr(nodes, "MAX_SECONDS_FOR_A_FILE", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    probes = [nodes.Probe(tmp_path / ("other" if rank == 2 else "run"), rank, "token") for rank in range(4)]
    probes[0].write()
    answers = [probe.answer() for probe in probes]
    assert [answer["problem"] for answer in answers] == [None, None, "does not contain what rank 0 wrote there", None]
    assert probes[0].missing(answers[:2]) is None
    sentence = probes[0].missing(answers)
    assert sentence is not None and f"{tmp_path}/other on" in sentence and "(rank 2) does not contain" in sentence
    probes[3].remove()
    sentence = probes[0].missing([*answers[:2], answers[3]])
    assert sentence is not None and "(rank 3) contains files that rank 0 does not see" in sentence
    for probe in probes:
        probe.remove()
    assert not list((tmp_path / "run").iterdir())


HOSTS = ["node-a", "node-a", "node-b", "node-b"]


def test_slow_ranks_are_judged_by_the_median_for_their_work() -> None:
    assert slow_ranks([1.0, 1.1, 1.0, 1.2], [0] * 4, HOSTS) == {}
    found = slow_ranks([1.0, 1.0, 1.0, 2.0], [0] * 4, HOSTS)
    assert list(found) == [3] and found[3].startswith("rank 3 on node-b is slow: 2.00 × the median rank's time")
    assert list(slow_ranks([1.0, 2.0], [0, 0], HOSTS)) == [1]
    assert slow_ranks([0.0, 0.0], [0, 0], HOSTS) == {}


def test_ranks_with_other_stages_of_a_pipeline_are_not_compared() -> None:
    assert slow_ranks([1.0, 9.0], [0, 1], HOSTS) == {}
    assert slow_ranks([1.0, 1.0, 9.0, 9.5], [0, 0, 1, 1], HOSTS) == {}
    found = slow_ranks([1.0, 2.0, 9.0, 9.0], [0, 0, 1, 1], HOSTS)
    assert list(found) == [1] and "2.00 × the median" in found[1]


def test_stopwatch_averages_the_first_training_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(float(number**2) for number in range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    watch = Stopwatch(torch.device("cpu"))
    assert watch.take() == 0.0
    for _ in range(2):
        with watch.measure():
            pass
    assert watch.take() == (1 + 5) / 2
    with torch.no_grad(), watch.measure():
        pass
    assert watch.take() == 0.0
    for _ in range(2 * Stopwatch.MOST):
        with watch.measure():
            pass
    assert next(ticks) == (4 + 2 * Stopwatch.MOST) ** 2


def test_a_new_run_starts_with_the_weights_of_one_process() -> None:
    config = run_config("exoformer")
    whole = residua.build(config.model).state_dict()
    torch.manual_seed(0)
    states = [(name, part.state_dict()) for name, part in starting_parts(config)]
    parts = {f"{name}.{key}": value for name, state in states for key, value in state.items()}
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


def test_a_resumed_run_draws_no_random_numbers_for_its_parts() -> None:
    config = run_config("mhc").override(["model.topology.kind=mhc_lite"])
    before = torch.get_rng_state()
    parts = dict(starting_parts(config, resumed=True))
    assert torch.equal(torch.get_rng_state(), before)
    # checkpoints hold all that a part needs (tests/model/test_initial.py)
    assert not dict(parts["topology"].named_buffers())
