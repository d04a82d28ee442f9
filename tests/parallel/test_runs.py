"""Whole runs on several ranks: checkpoints that any number of ranks can read, and deaths that cost little."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import residua
from residua.train.checkpoint import checkpoints
from residua.train.config import RunConfig
from residua.train.parallel.convert import convert
from residua.train.run import read_metrics
from residua.train.trainer import train
from tests.parallel.launch import ROOT, environment, launch, start
from tests.train.conftest import config, data  # noqa: F401

pytestmark = pytest.mark.slow


def curve(run: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"}


def spec(folder: Path, config: RunConfig, **asked: Any) -> Path:  # noqa: F811
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(config.to_toml())
    path = folder / f"spec-{len(list(folder.iterdir()))}.json"
    path.write_text(json.dumps({"config": str(folder / "config.toml"), **asked}))
    return path


@pytest.fixture
def recipe(config: RunConfig) -> RunConfig:  # noqa: F811
    return config.override(
        ["train.log_every=1", "train.accumulate=4", "train.micro_batch=1", "train.schedule.warmup=1"]
    )


@pytest.fixture
def unbroken(recipe: RunConfig, tmp_path: Path) -> dict[int, float]:
    """The losses of one process from the first step to the last."""
    train(recipe, tmp_path / "unbroken")
    return curve(tmp_path / "unbroken")


def test_two_ranks_then_one_then_two_go_on_with_the_same_curve(
    recipe: RunConfig, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """Shards of two ranks are read by one process, whose single files are read by a pipeline of two."""
    run, asked = tmp_path / "run", tmp_path / "asked"
    one = ["train.steps=2", "parallel.shard=2"]
    launch(2, "tests.parallel.train_run", spec(asked, recipe, out=str(run), changes=one))
    assert (run / "checkpoints/step-2/shards").is_dir()
    convert(run, tmp_path / "files")
    assert (tmp_path / "files/checkpoints/step-2/model.safetensors").exists()
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
    with pytest.raises(ValueError, match=r"step-2/shards cannot be read"):
        residua.load(incomplete)

    train(recipe.override(["train.steps=4"]), run, resume=True)
    assert (run / "checkpoints/step-4/model.safetensors").exists()

    three = ["train.steps=6", "parallel.pipeline=2"]
    launch(2, "tests.parallel.train_run", spec(asked, recipe, out=str(run), changes=three, resume=True))
    # the schedule depends on train.steps, so the pieces are compared with pieces of one process
    again = tmp_path / "again"
    for steps in (2, 4, 6):
        train(recipe.override([f"train.steps={steps}"]), again, resume=again.exists())
    assert curve(run) == pytest.approx(curve(again), abs=1e-4)
    assert curve(run).keys() == unbroken.keys()


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    recipe: RunConfig, unbroken: dict[int, float], tmp_path: Path
) -> None:
    """torchrun starts the job again; the survivor has named the dead; the curve is the unbroken one."""
    run = tmp_path / "run"
    dies = {"rank": 1, "after": 5}
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=["parallel.shard=2"], dies=dies)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", "-m", "tests.parallel.train_run", str(asked)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    named = r"residua: rank 1 \(process \d+ on .*\) died, last heard of after step \d; the last good checkpoint is"
    assert re.search(named, done.stderr), done.stderr[-3000:]
    sessions = json.loads((run / "environment.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 4]
    assert curve(run) == pytest.approx(unbroken, abs=1e-4)
    assert checkpoints(run)[-1].step == 6


def test_a_rank_that_hangs_is_named_and_ends_the_others_in_bounded_time(recipe: RunConfig, tmp_path: Path) -> None:
    """A stopped process keeps its connections open: nothing fails, only the beat is missing."""
    dies = {"rank": 1, "after": 3, "by": "SIGSTOP"}
    changes = ["parallel.data=2", "parallel.patience=5"]
    asked = spec(tmp_path / "asked", recipe, out=str(tmp_path / "run"), changes=changes, dies=dies)
    survivor, stopped = start(2, "tests.parallel.train_run", asked)
    try:
        said = survivor.communicate(timeout=90)[0]
    finally:
        stopped.kill()
        stopped.communicate()
    assert survivor.returncode == 1, said
    assert re.search(r"residua: rank 1 \(.*\) failed: it was silent for 5 seconds", said), said
    assert checkpoints(tmp_path / "run")[-1].step == 2
