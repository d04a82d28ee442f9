"""Which process trains what, and when: with stand-ins for trainers, which need milliseconds."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from residua.config.run import RunConfig
from residua.study import worker
from residua.study.crew import OUT_OF_MEMORY, Crew, Request
from residua.study.plan import PlannedRun
from residua.study.runner import by_graph
from residua.study.worker import tell

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
def crew(tmp_path: Path) -> Crew:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def command(first: Request) -> list[str]:
        return [sys.executable, "-S", str(script), str(tmp_path), first.config]

    return Crew([], 1, tmp_path / "study", Watched(), dict(os.environ), command=command)


def group(crew: Crew, *names: str) -> list[PlannedRun]:
    config = RunConfig.find("tiny").override(["train.steps=1000"])
    return [PlannedRun(name, "tiny", 0, config, crew.out / "runs" / name) for name in names]


def events(crew: Crew) -> list[tuple[str, str, int]]:
    return [tuple(json.loads(line)) for line in (crew.out.parent / "events").read_text().splitlines()]


def processes(crew: Crew) -> dict[str, int]:
    return {name: process for what, name, process in events(crew) if what == "train"}


def work(crew: Crew, *groups: list[PlannedRun]) -> dict[str, str]:
    crew.groups = list(groups)
    crew.work()
    assert isinstance(crew.watcher, Watched)
    assert crew.watcher.ended.keys() == {run.title for runs in groups for run in runs}
    return {run.title: problem for run, problem in crew.problems.items()}


def test_runs_of_a_group_share_a_process_and_other_groups_have_their_own(crew: Crew) -> None:
    assert work(crew, group(crew, "a0", "a1", "a2"), group(crew, "b0", "b1")) == {}
    used = processes(crew)
    assert used["a0"] == used["a1"] == used["a2"] != used["b0"] == used["b1"]


def test_one_trains_at_a_time_and_the_next_group_compiles_meanwhile(crew: Crew) -> None:
    assert work(crew, group(crew, "slow_a", "slow_b"), group(crew, "c"), group(crew, "d")) == {}
    order = [(what, name) for what, name, _ in events(crew)]
    training: set[str] = set()
    for what, name in order:
        training = training | {name} if what == "train" else training - {name} if what == "trained" else training
        assert len(training) <= 1
    assert order.index(("compile", "c")) < order.index(("ended", "slow_b"))


def test_a_divided_group_keeps_the_budgets_of_a_seed_together(crew: Crew) -> None:
    config = RunConfig.find("tiny").override(["train.steps=1000"])
    runs = [
        PlannedRun("slow", "tiny", seed, config, crew.out / "runs" / f"slow{seed}-{budget}", budget)
        for seed in range(3)
        for budget in (2.0, 1.0, 0.5)
    ]
    crew.places = 3
    assert work(crew, runs) == {}
    used = processes(crew)
    assert all(len({used[f"slow{seed}-{budget}"] for budget in (2.0, 1.0, 0.5)}) == 1 for seed in range(3))
    assert len(set(used.values())) == 3


def test_a_group_is_divided_when_there_are_more_places_than_groups(crew: Crew) -> None:
    crew.places = 3
    assert work(crew, group(crew, "together0", "together1", "together2", "together3")) == {}
    first = [process for what, _, process in events(crew) if what == "train"][:3]
    assert len(set(first)) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("diverges", "ended with status 1: it diverged (log: "),
        ("killed", "ended by signal 9"),
        ("stillborn", "ended with status 1: it could not be born (log: "),
    ],
)
def test_a_run_that_fails_leaves_the_others_of_its_process_alone(crew: Crew, name: str, words: str) -> None:
    problems = work(crew, group(crew, name, "next0", "next1"), group(crew, "other"))
    assert list(problems) == [name]
    assert problems[name].startswith(words)
    assert len({processes(crew)[run] for run in ("next0", "next1")}) == 1


def test_a_run_without_room_is_started_again_without_processes_that_wait(crew: Crew) -> None:
    assert work(crew, group(crew, "full0", "full1"), group(crew, "other")) == {}
    assert crew.ahead == 0
    assert [name for what, name, _ in events(crew) if what == "train"].count("full0") == 2


def test_the_timeline_says_when_each_run_got_how_far(crew: Crew) -> None:
    work(crew, group(crew, "a0", "a1"))
    lines = [json.loads(line) for line in (crew.out / "logs" / "timeline.jsonl").read_text().splitlines()]
    told = ["starts", "is compiled", "trains", "is trained", "has ended", "trains", "is trained", "has ended"]
    assert [line["event"] for line in lines] == told
    assert all(one["seconds"] <= other["seconds"] for one, other in pairwise(lines))


def test_groups_are_runs_that_differ_in_seed_rate_and_length_only(crew: Crew) -> None:
    base = RunConfig.find("tiny")
    changes = {
        "a": ["train.seed=1"],
        "b": ["model.topology.kind=multi_gate"],
        "c": ["train.optimizer.lr=0.1", "train.steps=7000"],
        "d": ["model.topology.kind=multi_gate", "data.seed=3"],
    }
    runs = [PlannedRun(name, "tiny", 0, base.override(c), crew.out / name) for name, c in changes.items()]
    assert [[run.variant for run in runs] for runs in by_graph(runs)] == [["a", "c"], ["b", "d"]]


def test_stopping_ends_every_process(crew: Crew) -> None:
    crew.groups = [group(crew, "a0"), group(crew, "b0")]
    (crew.out / "configs").mkdir(parents=True)
    (crew.out / "logs").mkdir()
    crew._start()
    begun = time.monotonic()
    crew.stop()
    assert time.monotonic() - begun < 60
    assert all(worker.child.returncode is not None for worker in crew._workers)


def test_a_worker_goes_on_when_the_study_was_killed() -> None:
    reader, writer = os.pipe()
    tell(writer, "ready")
    assert os.read(reader, 100) == b"ready\n"
    os.close(reader)
    tell(writer, "trained")  # nobody listens
    os.close(writer)


def test_worker_ends_when_a_run_cannot_be_built_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **settings: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker, "train", full)
    config = tmp_path / "run.toml"
    config.write_text(RunConfig.find("tiny").override(["train.device=cpu"]).to_toml())
    with pytest.raises(SystemExit) as ended:
        worker._Worker(lambda word: None).train(Request(str(config), str(tmp_path / "run"), str(tmp_path / "log")))
    assert ended.value.code == OUT_OF_MEMORY
