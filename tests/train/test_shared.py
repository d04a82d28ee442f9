"""Runs that share a process and its compiled code end with the same bits as runs in processes of their own."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from residua.train.shared import SharedWorld, graph_of
from rich.console import Console

from residua.config.run import RunConfig
from residua.train.health import Interrupted, TrainingStopped
from residua.train.step import Step
from residua.train.trainer import train
from tests.distributed.launch import start
from tests.train.test_resume import assert_same_run, stop_after

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
# Seeds, rates and lengths that one graph serves.
RUNS = {
    "zero": [],
    "one": ["train.seed=1", "data.seed=1"],
    "fast": ["train.seed=1", "train.optimizer.lr=0.03", "train.clip_norm=0.3"],
    "long": ["train.steps=5", "train.schedule.warmup=3"],
}
MODELS = [
    pytest.param(["train.precision=bfloat16"], id="copies"),
    pytest.param(["model.ffn={kind='moe', hidden=8, experts=4, top_k=2}"], id="experts", marks=pytest.mark.nightly),
    pytest.param(["train.recompute=sublayers", "data.masking=documents"], id="recomputed", marks=pytest.mark.nightly),
    pytest.param(["model.topology.kind=multi_gate"], id="mgr", marks=pytest.mark.nightly),
]


def shared(config: RunConfig, order: list[str], out: Path, world: SharedWorld | None = None) -> SharedWorld:
    """Train the named runs one after the other in one world."""
    world = world or SharedWorld(torch.device("cpu"))
    for name in order:
        train(config.override(RUNS[name]), out / name, console=QUIET, world=world)
    return world


def separate(config: RunConfig, name: str, out: Path) -> Path:
    """The same run with everything built anew."""
    torch.compiler.reset()
    train(config.override(RUNS[name]), out / name, console=QUIET)
    return out / name


@pytest.mark.parametrize("changes", MODELS)
def test_runs_that_share_a_step_equal_separate_ones_in_any_order(
    config: RunConfig, changes: list[str], tmp_path: Path
) -> None:
    config = config.override([*changes, "train.steps=4"])
    shared(config, ["fast", "long"], tmp_path / "shared")
    shared(config, ["long", "fast"], tmp_path / "turned")
    for name in ("fast", "long"):
        alone = separate(config, name, tmp_path / "alone")
        assert_same_run(tmp_path / "shared" / name, alone)
        assert_same_run(tmp_path / "turned" / name, alone)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_runs_on_one_compiled_step_equal_runs_that_compile_themselves(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend != "inductor":  # traced and guarded in the same way, without minutes of C++
        plain = partial(torch.compile, dynamic=False, backend=backend)
        monkeypatch.setattr("residua.train.losses.compile_rewritten", plain)
    config = config.override(["train.compile=on", "train.steps=2", "train.schedule.warmup=1", "model.layers=1"])
    world = SharedWorld(torch.device("cpu"))
    world.rehearse(config)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    shared(config, ["one", "zero"], tmp_path / "shared", world)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert_same_run(tmp_path / "shared" / "zero", separate(config, "zero", tmp_path / "alone"))


def test_a_shared_run_equals_one_in_a_process_of_its_own(config: RunConfig, tmp_path: Path) -> None:
    shared(config, ["one", "zero"], tmp_path / "shared")
    source, out = tmp_path / "run.toml", tmp_path / "own"
    source.write_text(config.to_toml())
    (own,) = start(1, "tests.soak.rank", "train", str(source), "--out", str(out))
    said = own.wait()
    assert own.process.exitcode == 0, said
    assert_same_run(tmp_path / "shared" / "zero", out)


def test_a_run_that_diverges_or_is_interrupted_leaves_nothing_to_the_next(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = separate(config, "one", tmp_path / "alone")
    world = SharedWorld(torch.device("cpu"))
    broken = config.override(["train.optimizer.lr=1e30", "train.log_every=1"])
    with pytest.raises(TrainingStopped):
        train(broken, tmp_path / "broken", console=QUIET, world=world)
    shared(config, ["one"], tmp_path / "after", world)
    assert_same_run(tmp_path / "after" / "one", alone)

    with monkeypatch.context() as patched:
        stop_after(patched, 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            shared(config, ["one"], tmp_path / "resumed", world)
    shared(config, ["zero"], tmp_path / "between", world)
    train(config.override(RUNS["one"]), tmp_path / "resumed" / "one", resume=True, console=QUIET, world=world)
    assert_same_run(tmp_path / "resumed" / "one", alone)


def test_the_step_is_built_once_for_a_graph_and_again_for_another(config: RunConfig) -> None:
    world = SharedWorld(torch.device("cpu"))
    first = world.build_step(config)
    assert all(world.build_step(config.override(changes)) is first for changes in RUNS.values())
    assert world.build_step(config.override(["model.layers=1"])) is not first


@pytest.mark.parametrize(
    "change",
    ["train.z_loss=0", "train.micro_batch=4", "train.compile=on", "data.sequence=8", "model.norm.kind=gatednorm"],
)
def test_what_the_compiler_sees_is_part_of_the_graph(config: RunConfig, change: str) -> None:
    assert graph_of(config.override([change])) != graph_of(config)


def test_a_run_says_where_the_time_before_its_first_step_went(config: RunConfig, tmp_path: Path) -> None:
    shared(config.override(["train.steps=3"]), ["zero"], tmp_path)
    session: dict[str, Any] = json.loads((tmp_path / "zero" / "environment.json").read_text())["sessions"][0]
    assert session["startup"].keys() == {"data", "build"}
    assert all(seconds >= 0 for seconds in session["startup"].values())


def test_the_world_tells_when_a_run_is_trained_and_saved(config: RunConfig, tmp_path: Path) -> None:
    world = SharedWorld(torch.device("cpu"))
    saved: list[list[str]] = []
    world.trained = lambda: saved.append(sorted(path.name for path in (tmp_path / "zero" / "checkpoints").iterdir()))
    shared(config, ["zero"], tmp_path, world)
    assert saved == [["step-4", "step-6"]]
    assert isinstance(world.build_step(config), Step)
