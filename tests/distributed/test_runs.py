"""Whole runs on several ranks: checkpoints that any number of ranks can read, and ranks that die."""

import re
import shutil
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.distributed.convert import convert
from residua.train.trainer import train
from tests.distributed.conftest import TRAIN, Ranks, curve
from tests.distributed.launch import LIMIT, torchrun

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unbroken(recipe: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one process from the first step to the last."""
    run = tmp_path_factory.mktemp("unbroken") / "run"
    train(recipe, run)
    return curve(run)


def test_run_resumes_on_two_one_then_two_ranks_with_one_curve(ranks: Ranks, recipe, unbroken, tmp_path: Path) -> None:
    """Shards of two ranks are read by one process, whose single files are read by a pipeline of two.

    λ of x0 injection, which learns at a hundredth of the rate, keeps that rate in all of them.
    """
    ranks.recipe = recipe = recipe.override(["model.topology.kind=x0"])
    run = ranks.run
    ranks.train(2, "train.steps=2", "parallel.shard=2")
    assert (run / "checkpoints/step-2/shards").is_dir()
    convert(run, tmp_path / "files")
    assert (tmp_path / "files/checkpoints/step-2/model.safetensors").exists()
    with pytest.raises(ValueError, match=r"files is not empty: name a new folder\.$"):
        convert(run, tmp_path / "files")
    both = (residua.load(folder).parameters() for folder in (run, tmp_path / "files"))
    assert all(torch.equal(shards, files) for shards, files in zip(*both, strict=True))

    incomplete = tmp_path / "incomplete"
    shutil.copytree(run, incomplete)
    (incomplete / "checkpoints/step-2/shards/shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks rows of tensor .*: a file that one of the ranks wrote is missing"):
        residua.load(incomplete)
    next(incomplete.glob("checkpoints/step-2/shards/*")).write_bytes(b"cut short")
    sentence = r"step-2/shards/shard-.*\.safetensors cannot be read .*: no other checkpoint is complete"
    with pytest.raises(ValueError, match=sentence):
        residua.load(incomplete)

    train(recipe.override(["train.steps=4"]), run, resume=True)
    assert (run / "checkpoints/step-4/model.safetensors").exists()
    ranks.train(2, "train.steps=6", "parallel.pipeline=2", resume=True)
    # the schedule depends on train.steps, so the pieces are compared with pieces of one process
    again = tmp_path / "again"
    for steps in (2, 4, 6):
        train(recipe.override([f"train.steps={steps}"]), again, resume=again.exists())
    assert curve(run) == pytest.approx(curve(again), abs=1e-4)
    assert curve(run).keys() == unbroken.keys()
    models = residua.load(run), residua.load(again), residua.build(recipe.model)
    streams = [model.topology.get_parameter("scalars.stream") for model in models]
    moved = (streams[1] - streams[2]).abs().max()
    assert (streams[0] - streams[1]).abs().max() < 0.1 * moved < 1e-3


@pytest.mark.nightly
def test_divided_experts_are_saved_as_one_model_and_resume_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks with different experts save shards. One process reads them and continues, as if it had saved them."""
    mixture = ["model.ffn.kind=moe", "model.ffn.experts=4", "model.ffn.top_k=2", "model.ffn.hidden=16"]
    off = ["train.telemetry=off", "train.balance.weight=1", "train.steps=2"]
    small = ranks.recipe = ranks.recipe.override([*mixture, *off])
    run, again = ranks.run, tmp_path / "again"
    ranks.train(2, "parallel.shard=2", "parallel.experts=2")
    train(small, again)
    for divided, alone in zip(residua.load(run).parameters(), residua.load(again).parameters(), strict=True):
        torch.testing.assert_close(divided, alone, rtol=0, atol=1e-4)
    for folder in (run, again):
        train(small.override(["train.steps=4"]), folder, resume=True)
    assert curve(run) == pytest.approx(curve(again), abs=1e-5)


def test_killed_rank_loses_only_steps_since_the_checkpoint(ranks: Ranks, unbroken: dict[int, float]) -> None:
    """torchrun starts the job again, the survivor names the dead rank, and the losses are those of an unbroken run."""
    asked = ranks.spec("parallel.shard=2", dies={"rank": 1, "after": 5}, beat=0.25)
    agent = torchrun(2, TRAIN, asked, restarts=1)
    assert agent.process.exitcode == 0, agent.said()[-3000:]
    named = r"residua: rank 1 \(process \d+ on .*\) died, last heard of after step 5; the last good checkpoint is"
    assert len(re.findall(named, agent.said())) == agent.said().count("residua: ") == 1, agent.said()[-3000:]
    assert ranks.from_steps() == [0, 4]
    assert curve(ranks.run) == pytest.approx(unbroken, abs=1e-4)
    assert ranks.saved()[-1] == 6


@pytest.fixture
def gate(ranks: Ranks, tmp_path: Path) -> Path:
    """A file that lets two ranks save step 4, which they wait for; they have done step 5."""
    gate = tmp_path / "gate"
    ranks.start(2, "parallel.shard=2", holds=["step-4", str(gate)], beat=0.25)
    until = time.monotonic() + LIMIT
    while not ((ranks.run / "metrics.jsonl").exists() and 5 in curve(ranks.run)):
        assert time.monotonic() < until, [rank.said() for rank in ranks.started]
        time.sleep(0.05)
    return gate


def test_training_continues_while_a_checkpoint_is_written(ranks: Ranks, gate: Path) -> None:
    """It gets its name when all ranks have written it, not before."""
    assert ranks.saved() == [2]
    assert list(ranks.run.glob("checkpoints/*step-4/state.json"))
    gate.touch()
    ranks.wait()
    assert ranks.saved()[-2:] == [4, 6]


def test_death_during_a_save_keeps_the_previous_checkpoint(ranks: Ranks, gate: Path, recipe, unbroken) -> None:
    """The survivor waits for the save, which fails because of the rank that it names, not because of its disk."""
    run, (survivor, dead) = ranks.run, ranks.started
    while not any(record["step"] == 6 for record in ranks.records("validation")):
        time.sleep(0.05)
    dead.kill()
    gate.touch()
    assert re.search(r"residua: rank 1 \(.*\) died, last heard of after step 6; the last good", survivor.wait())
    assert ranks.saved() == [2]
    residua.load(run)
    train(recipe, run, resume=True)
    assert ranks.from_steps()[-1] == 2
    assert curve(run) == pytest.approx(unbroken, abs=1e-4)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-4", "step-6"]


def test_only_the_leader_reports_a_refusal(ranks: Ranks) -> None:
    """The others outlast it: if another rank ended first, torchrun would end rank 0 before it could print anything."""
    ranks.run.mkdir()
    (ranks.run / "mine.txt").touch()
    ranks.start(2, "parallel.data=2", hesitates=1.5, beat=0.5)
    sentinels = [rank.process.sentinel for rank in ranks.started]
    assert connection.wait(sentinels, timeout=LIMIT) == sentinels[:1]
    leader, other = ranks.wait()
    assert leader.startswith("residua: ") and leader.count("residua: ") == 1 and "residua: " not in other
    assert ranks.codes == [2, 2]


def test_hanging_rank_is_named_and_the_others_end_in_time(ranks: Ranks) -> None:
    """A stopped process keeps its connections open: nothing fails, only its heartbeats are missing."""
    dies = {"rank": 1, "after": 3, "by": "SIGSTOP", "patience": 2}
    ranks.start(2, "parallel.data=2", "parallel.patience=600", dies=dies, beat=0.25)
    said = ranks.started[0].wait()
    assert ranks.codes[0] == 1, said
    assert re.search(r"residua: rank 1 \(.*\) failed: it sent nothing for 2 seconds", said), said
    assert f"manually, run `torchrun --nproc-per-node 2 --no-python residua train --resume --out {ranks.run}`" in said
    assert ranks.saved()[-1] == 2
    measured = [record["step"] for record in ranks.records("telemetry")]
    assert measured[:2] == [1, 2] and "telemetry is off" not in said  # the leader measures, the other waits


@pytest.mark.parametrize(
    ("full", "path"),
    [
        (["step-4", 1], r"checkpoints/step-4"),
        pytest.param(['"step": 3', 0], r"metrics\.jsonl", marks=pytest.mark.nightly),
    ],
    ids=["a shard", "metrics"],
)
def test_full_disk_is_reported_once_and_keeps_checkpoints(ranks: Ranks, full: list[Any], path: str) -> None:
    """Whichever rank cannot write, rank 0 reports it and the others end silently."""
    ranks.start(2, "parallel.shard=2", full=full, beat=0.25)
    said = ranks.wait()
    spoken = re.findall(r"residua: .*", "\n".join(said))
    assert len(spoken) == 1 and spoken[0] in said[0] and "Traceback" not in "".join(said), said
    assert re.search(rf"{path}: No space left on device; the last good checkpoint is \S+step-2: make room", spoken[0])
    assert all(ranks.codes)
    assert ranks.saved() == [2] and residua.load(ranks.run) is not None
    assert not list(ranks.run.rglob(".unfinished-*"))
