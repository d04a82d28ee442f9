"""A mesh that cannot be is refused in one sentence, before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from residua.model.settings import ConfigError
from residua.train.world import World, open_world
from tests.parallel.cases import run_config

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"data": 3}, "train.accumulate = 4 micro-batches cannot be shared by"),
    "shards": ({"shard": 8}, "use a multiple of 8"),
    "layers": ({"pipeline": 5, "schedule": "gpipe"}, "5 stages are more than the 4 layers"),
    "flow": ({"pipeline": 2, "data": 4}, "the 1f1b schedule needs at least parallel.pipeline = 2"),
    "rounds": (
        {"pipeline": 2, "data": 4, "schedule": "interleaved", "stages_per_rank": 2},
        "the interleaved schedule needs a multiple of parallel.pipeline = 2",
    ),
    "stages": ({"pipeline": 2, "stages_per_rank": 2}, "the interleaved schedule has 2 or more stages per rank"),
    "kind": ({"schedule": "1f1c"}, "did you mean '1f1b'?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mesh_that_does_not_fit_the_run_is_refused(name: str) -> None:
    parallel, sentence = WRONG[name]
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        run_config("additive", parallel)


def test_experts_are_not_pipelined() -> None:
    with pytest.raises(ConfigError, match=r"use parallel\.data or parallel\.shard"):
        run_config("moe", {"pipeline": 2})


def test_a_mesh_without_its_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match=r"asks for 2 processes .* and 1 were started: use torchrun"):
        open_world(run_config("additive", {"shard": 2}))


def test_processes_without_a_mesh_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"asks for 1 processes .* and 4 were started"):
        open_world(run_config("additive"))


def test_only_one_of_many_ranks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        open_world(run_config("additive"))


def test_a_job_that_torchrun_starts_again_goes_on_in_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    world, config = World(torch.device("cpu")), run_config("additive")
    run = world.open_run(tmp_path / "run", config, resume=False)
    run.begin({}, 0)
    run.close()
    with pytest.raises(ConfigError, match="is not empty"):
        world.open_run(tmp_path / "run", config, resume=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    world.open_run(tmp_path / "run", config, resume=False).close()


def test_the_command_that_starts_a_run_again_starts_as_many_processes() -> None:
    assert run_config("additive").parallel.command == "residua train"
    started = run_config("additive", {"data": 2, "pipeline": 2}).parallel.command
    assert started == "torchrun --nproc-per-node 4 -m residua.cli.main train"


def test_the_mesh_does_not_change_the_batch() -> None:
    alone, divided = run_config("additive"), run_config("additive", {"data": 2, "pipeline": 2})
    assert alone.tokens_per_step == divided.tokens_per_step
