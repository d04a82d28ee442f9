"""Which process trains what, and when: with stand-ins for trainers, which need milliseconds."""

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from residua.config.run import RunConfig
from residua.study import worker_pool
from residua.study.plan import PlannedRun
from residua.study.train_runs import by_graph
from residua.study.worker_pool import OUT_OF_MEMORY, Request, TrainingProcess, WorkerPool, answer

pytestmark = pytest.mark.slow  # it starts processes

WORKER = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
def note(what, name):
    with (out / "events").open("a") as file:
        file.write(json.dumps([what, name, os.getpid()]) + "\\n")
def say(word):
    print(word, flush=True)
first = pathlib.Path(sys.argv[2]).stem
note("compile", first)
if first.startswith("stillborn"):
    sys.exit("it could not be born")
say("ready")
for line in sys.stdin:
    request = json.loads(line)
    folder, log = pathlib.Path(request["folder"]), pathlib.Path(request["log"])
    name = folder.name
    note("train", name)
    if name.startswith("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("full") and not (out / "room").exists():
        (out / "room").touch()
        sys.exit(75)
    if name.startswith("diverges"):
        log.write_text("residua: it diverged\\n")
        say("ended 1")
        continue
    if name.startswith("slow"):
        time.sleep(0.5)
    if name.startswith("together"):  # waits for two others
        for _ in range(6000):
            if (out / "events").read_text().count('["train", "together') >= 3:
                break
            time.sleep(0.01)
        else:
            say("ended 1")
            continue
    note("trained", name)
    say("trained")
    folder.mkdir(parents=True)
    row = {"step": 1000, "loss": 1.0, "tokens": 9, "seconds": 1.0}
    rows = [{**row, "kind": "train", "tokens_per_second": 9.0, "memory_gib": 1.0}]
    rows += [{**row, "kind": "validation", "bits_per_byte": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
    (folder / "inspection.json").write_text("{}")
    note("ended", name)
    say("ended 0")
"""


class Watched:
    def __init__(self) -> None:
        self.started_runs: list[str] = []
        self.ended: dict[str, str] = {}

    def started(self, run: PlannedRun, step: int) -> None:
        self.started_runs.append(run.title)

    def advanced(self, run: PlannedRun, step: int, loss: float | None) -> None: ...

    def finished(self, run: PlannedRun, problem: str) -> None:
        self.ended[run.title] = problem


@pytest.fixture
def pool(tmp_path: Path) -> WorkerPool:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def command(first: Request) -> list[str]:
        return [sys.executable, "-S", str(script), str(tmp_path), first.config]

    return WorkerPool([], 1, tmp_path / "study", Watched(), dict(os.environ), command=command)


def group(pool: WorkerPool, *names: str) -> list[PlannedRun]:
    config = RunConfig.find("tiny").override(["train.steps=1000"])
    return [PlannedRun(name, "tiny", 0, config, pool.out / "runs" / name) for name in names]


def events(pool: WorkerPool) -> list[tuple[str, str, int]]:
    return [tuple(json.loads(line)) for line in (pool.out.parent / "events").read_text().splitlines()]


def processes(pool: WorkerPool) -> dict[str, int]:
    return {name: process for what, name, process in events(pool) if what == "train"}


def work(pool: WorkerPool, *groups: list[PlannedRun]) -> dict[str, str]:
    pool.groups = list(groups)
    pool.work()
    assert isinstance(pool.watcher, Watched)
    assert pool.watcher.ended.keys() == {run.title for runs in groups for run in runs}
    return {run.title: problem for run, problem in pool.problems.items()}


def test_runs_of_a_group_share_a_process(pool: WorkerPool) -> None:
    assert work(pool, group(pool, "a0", "a1", "a2"), group(pool, "b0", "b1")) == {}
    used = processes(pool)
    assert used["a0"] == used["a1"] == used["a2"] != used["b0"] == used["b1"]


def test_one_group_trains_while_the_next_compiles(pool: WorkerPool) -> None:
    assert work(pool, group(pool, "slow_a", "slow_b"), group(pool, "c"), group(pool, "d")) == {}
    order = [(what, name) for what, name, _ in events(pool)]
    training: set[str] = set()
    for what, name in order:
        training = training | {name} if what == "train" else training - {name} if what == "trained" else training
        assert len(training) <= 1
    assert order.index(("compile", "c")) < order.index(("ended", "slow_b"))


def test_a_divided_group_keeps_the_budgets_of_a_seed_together(pool: WorkerPool) -> None:
    config = RunConfig.find("tiny").override(["train.steps=1000"])
    runs = [
        PlannedRun("slow", "tiny", seed, config, pool.out / "runs" / f"slow{seed}-{budget}", budget)
        for seed in range(3)
        for budget in (2.0, 1.0, 0.5)
    ]
    pool.places = 3
    assert work(pool, runs) == {}
    used = processes(pool)
    assert all(len({used[f"slow{seed}-{budget}"] for budget in (2.0, 1.0, 0.5)}) == 1 for seed in range(3))
    assert len(set(used.values())) == 3


def test_a_group_is_divided_among_free_workers(pool: WorkerPool) -> None:
    pool.places = 3
    assert work(pool, group(pool, "together0", "together1", "together2", "together3")) == {}
    first = [process for what, _, process in events(pool) if what == "train"][:3]
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diverges", "ended with status 1: it diverged (log: "),
        ("killed", "ended by signal 9"),
        ("stillborn", "ended with status 1: it could not be born (log: "),
    ],
)
def test_a_failing_run_does_not_affect_others_in_its_process(pool: WorkerPool, name: str, words: str) -> None:
    problems = work(pool, group(pool, name, "next0", "next1"), group(pool, "other"))
    assert list(problems) == [name]
    assert problems[name].startswith(words)
    assert len({processes(pool)[run] for run in ("next0", "next1")}) == 1


def test_a_run_that_runs_out_of_memory_is_restarted_alone(pool: WorkerPool) -> None:
    assert work(pool, group(pool, "full0", "full1"), group(pool, "other")) == {}
    assert pool.ahead == 0
    assert [name for what, name, _ in events(pool) if what == "train"].count("full0") == 2


def test_the_timeline_records_the_progress_of_each_run(pool: WorkerPool) -> None:
    work(pool, group(pool, "a0", "a1"))
    lines = [json.loads(line) for line in (pool.out / "logs" / "timeline.jsonl").read_text().splitlines()]
    told = ["starts", "is compiled", "trains", "is trained", "has ended", "trains", "is trained", "has ended"]
    assert [line["event"] for line in lines] == told
    assert all(one["seconds"] <= other["seconds"] for one, other in pairwise(lines))


def test_runs_of_a_group_differ_only_in_seed_rate_and_length(pool: WorkerPool) -> None:
    base = RunConfig.find("tiny")
    changes = {
        "a": ["train.seed=1"],
        "b": ["model.topology.kind=multi_gate"],
        "c": ["train.optimizer.lr=0.1", "train.steps=7000"],
        "d": ["model.topology.kind=multi_gate", "data.seed=3"],
    }
    runs = [PlannedRun(name, "tiny", 0, base.override(c), pool.out / name) for name, c in changes.items()]
    assert [[run.variant for run in runs] for runs in by_graph(runs)] == [["a", "c"], ["b", "d"]]


def test_stopping_the_pool_ends_every_process(pool: WorkerPool) -> None:
    pool.groups = [group(pool, "a0"), group(pool, "b0")]
    (pool.out / "configs").mkdir(parents=True)
    (pool.out / "logs").mkdir()
    pool._start()
    begun = time.monotonic()
    pool.stop()
    assert time.monotonic() - begun < 60
    assert all(worker.child.returncode is not None for worker in pool._workers)


def test_worker_continues_after_the_study_is_killed() -> None:
    reader, writer = os.pipe()
    answer(writer, "ready")
    assert os.read(reader, 100) == b"ready\n"
    os.close(reader)
    answer(writer, "trained")  # nobody listens
    os.close(writer)


def test_worker_ends_if_building_a_run_exceeds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker_pool, "train", full)
    config = tmp_path / "run.toml"
    config.write_text(RunConfig.find("tiny").override(["train.device=cpu"]).to_toml())
    with pytest.raises(SystemExit) as ended:
        TrainingProcess(lambda word: None).train(Request(str(config), str(tmp_path / "run"), str(tmp_path / "log")))
    assert ended.value.code == OUT_OF_MEMORY
