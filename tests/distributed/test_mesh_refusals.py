"""An impossible mesh is refused in one sentence, before anything starts."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from residua.cli import main as command
from residua.config.settings import ConfigError
from residua.distributed.mesh import Processes
from residua.distributed.world import open_world
from residua.train.health import TrainingStopped
from residua.train.world import World
from tests.distributed.cases import MODELS, run_config
from tests.distributed.launch import environment, torchrun

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"data": 3}, "train.accumulate = 4 micro-batches cannot be divided among"),
    "shards": ({"shard": 8}, "use a multiple of 8"),
    "layers": ({"pipeline": 5, "schedule": "gpipe"}, "5 stages are more than the 4 layers"),
    "flow": ({"pipeline": 2, "data": 4}, "the 1f1b schedule needs at least parallel.pipeline = 2"),
    "rounds": ({"pipeline": 2, "data": 4, "schedule": "interleaved", "stages_per_rank": 2},
               "the interleaved schedule needs a multiple of parallel.pipeline = 2"),
    "stages": ({"pipeline": 2, "stages_per_rank": 2}, "use at least 2 stages per rank for the interleaved"),
    "kind": ({"schedule": "1f1c"}, "did you mean '1f1b'?"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_mesh_that_does_not_fit_the_run_is_refused(name: str) -> None:
    parallel, sentence = WRONG[name]
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        run_config("additive", parallel)


WRONG_EXPERTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "shards": ("moe", {"shard": 2, "experts": 4}, "parallel.experts = 4 does not divide parallel.shard = 2"),
    "unit": ("moe", {"shard": 2, "experts": 2, "unit": "model"}, "cannot be combined with parallel.unit = 'model'"),
    "dense": ("additive", {"shard": 2, "experts": 2}, "cannot be combined with model.ffn.kind = 'swiglu'"),
    "shares": ("three", {"shard": 2, "experts": 2}, "model.ffn.experts = 3 cannot be divided equally among parallel"),
    "biases": ("biased", {"shard": 3, "experts": 3}, "divides the matrices of experts but not their biases"),
    "slices": ("three", {"shard": 9, "experts": 3}, "model.ffn.hidden = 8 rows each, cannot be sharded equally"),
}


@pytest.mark.parametrize("name", WRONG_EXPERTS)
def test_experts_that_the_ranks_cannot_share_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, parallel, sentence = WRONG_EXPERTS[name]
    three = {"kind": "moe", "experts": 3, "top_k": 2, "hidden": 8}
    monkeypatch.setitem(MODELS, "three", {"ffn": three})
    monkeypatch.setitem(MODELS, "biased", {"ffn": three | {"bias": True}})
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run_config(model, parallel, accumulate=parallel["shard"])


def test_a_mesh_of_another_size_than_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    for size, parallel, start, words in (
        ("", {"shard": 2}, open_world, r"asks for 2 processes .* but 1 was started: use torchrun"),
        ("4", {}, open_world, r"asks for 1 process .* but 4 were started"),
        ("2", {"shard": 2}, World.alone, r"pass the result of residua\.distributed\.world\.open_world"),
    ):
        if size:
            monkeypatch.setenv("WORLD_SIZE", size)
        else:
            monkeypatch.delenv("WORLD_SIZE", raising=False)
        with pytest.raises(ConfigError, match=words):
            start(run_config("additive", parallel))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["parallel.shard=2"], "residua: parallel asks for 2 processes (data 1 × shard 2 × pipeline 1), but 3"),
        pytest.param(
            ["parallel.shard=5"],
            "residua: train.accumulate = 4 micro-batches cannot be divided among",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_only_one_of_many_ranks_reports_a_mistake(changes: list[str], sentence: str, tmp_path: Path) -> None:
    """Holds even if rank 0 is the last to find it: a rank that ends makes torchrun end the others."""
    run = ["train", "tiny", "train.accumulate=4", *changes, "--out", str(tmp_path / "run")]
    agent = torchrun(3, "tests.distributed.command", *run)
    assert agent.process.exitcode != 0
    said = [line for line in agent.said().splitlines() if line.startswith("residua:")]
    assert [line.startswith(sentence) for line in said] == [True], agent.said()
    first_to_end = re.search(r"Root Cause.*?rank\s+: (\d)", agent.said(), re.DOTALL)
    assert first_to_end is not None and first_to_end[1] == "0", agent.said()
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_the_documented_torchrun_command_reports_a_mistake_once(tmp_path: Path) -> None:
    """`torchrun … --no-python residua`, all of whose processes import everything again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    residua = str(Path(sys.executable).with_name("residua"))
    command += ["--no-python", residua, "train", "tiny", "train.accumulate=4", "parallel.shard=4"]
    command += ["--out", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("residua:")]
    assert len(said) == 1 and said[0].startswith("residua: parallel asks for 4 processes"), done.stderr


def test_a_rank_that_is_not_ended_reports_its_own_mistake(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a rank without its own GPU, while rank 0 waits for it."""
    monkeypatch.setattr(command, "GRACE_SECONDS", 0)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        command.fail(ConfigError("process 1 of this machine has no GPU for itself."))
    assert capsys.readouterr().err == "residua: process 1 of this machine has no GPU for itself.\n"


def test_peer_lost_while_connecting_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("Gloo connectFullMesh failed with timed out connecting: Connection refused\nat pair.cc:152")

    monkeypatch.setattr(Processes, "start", fail)
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"could not connect \(Gloo .* refused\), probably .* run the same"
    with pytest.raises(TrainingStopped, match=words) as stop:
        open_world(run_config("additive", {"data": 2}))
    assert "\n" not in str(stop.value)


def test_job_restarted_by_torchrun_resumes_in_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    world, config = World(torch.device("cpu")), run_config("additive")
    run = world.open_run(tmp_path / "run", config, resume=False)
    run.begin({}, 0)
    run.close()
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not empty"):
        world.open_run(tmp_path / "run", config, resume=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    World(torch.device("cpu")).open_run(tmp_path / "run", config, resume=False).close()


def test_printed_resume_command_starts_as_many_processes() -> None:
    assert run_config("additive").parallel.command_on() == "residua train"
    parallel = run_config("additive", {"data": 2, "pipeline": 2}).parallel
    assert parallel.command_on() == "torchrun --nproc-per-node 4 --no-python residua train"
    meeting = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert parallel.command_on(nodes=2) == f"torchrun {meeting} --nproc-per-node 2 --no-python residua train"


def test_the_mesh_does_not_change_the_batch() -> None:
    alone, divided = run_config("additive"), run_config("additive", {"data": 2, "pipeline": 2})
    assert alone.tokens_per_step == divided.tokens_per_step
