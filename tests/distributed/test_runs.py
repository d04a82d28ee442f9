"""Whole runs on several ranks: checkpoints that any number of ranks can read, and ranks that die."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.distributed.convert import convert
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from residua.train.trainer import train
from tests.distributed.launch import LIMIT, Started, launch, start, torchrun
from tests.train.conftest import config, data  # noqa: F401

pytestmark = pytest.mark.slow
TRAIN = "tests.distributed.train_run"


def curve(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"}


def spec(folder: Path, config: RunConfig, **asked: Any) -> Path:  # noqa: F811
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config.to_toml())
    path = folder / f"spec-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({"config": str(folder / "config.toml"), **asked}))
    return path


@pytest.fixture(scope="module")
def recipe(config: RunConfig) -> RunConfig:  # noqa: F811
    shape = ["train.accumulate=4", "train.micro_batch=1", "train.schedule.warmup=1"]
    return config.override([*shape, "train.log_every=1", "train.telemetry=on"])


@pytest.fixture(scope="module")
def unbroken(recipe: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process from the first step to the last."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    train(recipe, run)
    return curve(run)


def test_two_ranks_then_one_then_two_go_on_with_the_same_curve(
    recipe: RunConfig, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """Shards of two ranks are read by one process, whose single files are read by a pipeline of two."""
    run, asked = tmp_path / "run", tmp_path / "asked"
    one = ["train.steps=2", "parallel.shard=2"]
    launch(2, TRAIN, spec(asked, recipe, out=str(run), changes=one))
    assert (run / "checkpoints/step-2/shards").is_dir()
    convert(run, tmp_path / "files")
    assert (tmp_path / "files/checkpoints/step-2/model.safetensors").exists()
    with pytest.raises(ValueError, match=r"files is not empty: name a new folder\.$"):
        convert(run, tmp_path / "files")
    for shards, files in zip(
        residua.load(run).parameters(), residua.load(tmp_path / "files").parameters(), strict=True
    ):
        assert torch.equal(shards, files)

    incomplete = tmp_path / "incomplete"
    shutil.copytree(run, incomplete)
    (incomplete / "checkpoints/step-2/shards/shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks rows of tensor .*: a file that one of the ranks wrote is missing"):
        residua.load(incomplete)
    next(incomplete.glob("checkpoints/step-2/shards/*")).write_bytes(b"cut short")
    with pytest.raises(
        ValueError, match=r"step-2/shards/shard-.*\.safetensors cannot be read .*: no other checkpoint is complete"
    ):
        residua.load(incomplete)

    train(recipe.override(["train.steps=4"]), run, resume=True)
    assert (run / "checkpoints/step-4/model.safetensors").exists()

    three = ["train.steps=6", "parallel.pipeline=2"]
    launch(2, TRAIN, spec(asked, recipe, out=str(run), changes=three, resume=True))
    # the schedule depends on train.steps, so the pieces are compared with pieces of one process
    again = tmp_path / "again"
    for steps in (2, 4, 6):
        train(recipe.override([f"train.steps={steps}"]), again, resume=again.exists())
    assert curve(run) == pytest.approx(curve(again), abs=1e-4)
    assert curve(run).keys() == unbroken.keys()


def test_divided_experts_are_saved_as_one_model_and_go_on_alone(recipe: RunConfig, tmp_path: Path) -> None:
    """Two ranks with different experts save shards. One process reads and trains them on, as if it had made them."""
    mixture = ["model.ffn.kind=moe", "model.ffn.experts=4", "model.ffn.top_k=2", "model.ffn.hidden=16"]
    small = recipe.override([*mixture, "train.telemetry=off", "train.balance.weight=1", "train.steps=2"])
    run, again = tmp_path / "run", tmp_path / "again"
    divided = ["parallel.shard=2", "parallel.experts=2"]
    launch(2, TRAIN, spec(tmp_path / "asked", small, out=str(run), changes=divided))
    train(small, again)
    for ranks, alone in zip(residua.load(run).parameters(), residua.load(again).parameters(), strict=True):
        torch.testing.assert_close(ranks, alone, rtol=0, atol=1e-4)
    for folder in (run, again):
        train(small.override(["train.steps=4"]), folder, resume=True)
    assert curve(run) == pytest.approx(curve(again), abs=1e-5)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    recipe: RunConfig, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """torchrun starts the job again, the survivor names the dead rank, and the losses are those of an unbroken run."""
    run = tmp_path / "run"
    dies = {"rank": 1, "after": 5}
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=["parallel.shard=2"], dies=dies, beat=0.25)
    agent = torchrun(2, TRAIN, asked, restarts=1)
    assert agent.process.exitcode == 0, agent.said()[-3000:]
    named = r"residua: rank 1 \(process \d+ on .*\) died, last heard of after step 5; the last good checkpoint is"
    assert len(re.findall(named, agent.said())) == agent.said().count("residua: ") == 1, agent.said()[-3000:]
    sessions = json.loads((run / "environment.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 4]
    assert curve(run) == pytest.approx(unbroken, abs=1e-4)
    assert checkpoints(run)[-1].step == 6


@pytest.fixture
def saving(recipe: RunConfig, tmp_path: Path) -> Iterator[tuple[Path, Path, list[Started]]]:
    """Two ranks that have done step 5 while step 4 is being saved: the run, the gate that lets them save, the ranks."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    held = {"changes": ["parallel.shard=2"], "holds": ["step-4", str(gate)], "beat": 0.25}
    ranks = start(2, TRAIN, spec(tmp_path / "asked", recipe, out=str(run), **held))
    until = time.monotonic() + LIMIT
    try:
        while not ((run / "metrics.jsonl").exists() and 5 in curve(run)):
            assert time.monotonic() < until, [rank.said() for rank in ranks]
            time.sleep(0.05)
        yield run, gate, ranks
    finally:
        for rank in ranks:
            rank.kill()


def test_training_goes_on_while_a_checkpoint_is_written(saving: Any) -> None:
    """It gets its name when all ranks have written it, not before."""
    run, gate, ranks = saving
    assert [found.step for found in checkpoints(run)] == [2]
    assert list(run.glob("checkpoints/*step-4/state.json"))
    gate.touch()
    for rank in ranks:
        rank.wait()
    assert [found.step for found in checkpoints(run)][-2:] == [4, 6]


def test_a_death_during_a_save_leaves_the_checkpoint_before_it(
    saving: Any, recipe: RunConfig, unbroken: dict[int, float]
) -> None:
    """The survivor waits for the save, which fails: not for its disk, but for the rank that it names."""
    run, gate, (survivor, dead) = saving
    while not any(r["kind"] == "validation" and r["step"] == 6 for r in read_metrics(run / "metrics.jsonl")):
        time.sleep(0.05)
    dead.kill()
    gate.touch()
    assert re.search(r"residua: rank 1 \(.*\) died, last heard of after step 6; the last good", survivor.wait())
    assert [found.step for found in checkpoints(run)] == [2]
    residua.load(run)
    train(recipe, run, resume=True)
    assert json.loads((run / "environment.json").read_text())["sessions"][-1]["from_step"] == 2
    assert curve(run) == pytest.approx(unbroken, abs=1e-4)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_only_the_leader_says_what_it_refuses_and_the_others_outlast_it(recipe: RunConfig, tmp_path: Path) -> None:
    """If another rank ended first, torchrun would end rank 0 before it could say anything."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").touch()
    changes = ["parallel.data=2"]
    asked = spec(tmp_path / "asked", recipe, out=str(tmp_path / "run"), changes=changes, hesitates=1.5, beat=0.5)
    leader, other = start(2, TRAIN, asked)
    ended = connection.wait([leader.process.sentinel, other.process.sentinel], timeout=LIMIT)
    assert ended == [leader.process.sentinel]
    assert leader.wait().startswith("residua: ") and leader.said().count("residua: ") == 1
    assert "residua: " not in other.wait()
    assert [leader.process.exitcode, other.process.exitcode] == [2, 2]


def test_a_rank_that_hangs_is_named_and_ends_the_others_in_bounded_time(recipe: RunConfig, tmp_path: Path) -> None:
    """A stopped process keeps its connections open: nothing fails, only its heartbeats are missing."""
    dies = {"rank": 1, "after": 3, "by": "SIGSTOP", "patience": 2}
    changes = ["parallel.data=2", "parallel.patience=600"]
    asked = spec(tmp_path / "asked", recipe, out=str(tmp_path / "run"), changes=changes, dies=dies, beat=0.25)
    survivor, stopped = start(2, TRAIN, asked)
    try:
        said = survivor.wait()
    finally:
        stopped.kill()
    assert survivor.process.exitcode == 1, said
    assert re.search(r"residua: rank 1 \(.*\) failed: it was silent for 2 seconds", said), said
    assert f"`torchrun --nproc-per-node 2 --no-python residua train --resume --out {tmp_path / 'run'}` by hand" in said
    assert checkpoints(tmp_path / "run")[-1].step == 2
    measured = [r["step"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "telemetry"]
    assert measured[:2] == [1, 2] and "telemetry is off" not in said  # the leader measures, the other waits


@pytest.mark.parametrize(
    ("full", "path"),
    [
        (["step-4", 1], r"checkpoints/step-4"),
        pytest.param(['"step": 3', 0], r"metrics\.jsonl", marks=pytest.mark.nightly),
    ],
    ids=["a shard", "metrics"],
)
def test_a_full_disk_is_reported_once_and_costs_no_checkpoint(
    recipe: RunConfig, tmp_path: Path, full: list[Any], path: str
) -> None:
    """Whichever rank cannot write, rank 0 says so and the others end in silence."""
    run = tmp_path / "run"
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=["parallel.shard=2"], full=full, beat=0.25)
    ranks = start(2, TRAIN, asked)
    said = [rank.wait() for rank in ranks]
    spoken = re.findall(r"residua: .*", "\n".join(said))
    assert len(spoken) == 1 and spoken[0] in said[0] and "Traceback" not in "".join(said), said
    assert re.search(rf"{path}: No space left on device; the last good checkpoint is \S+step-2: make room", spoken[0])
    assert all(rank.process.exitcode for rank in ranks)
    assert [found.step for found in checkpoints(run)] == [2] and residua.load(run) is not None
    assert not list(run.rglob(".unfinished-*"))
