"""Runs that share a process and its compiled code end with the same bits as runs in separate processes."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from residua.config.run import RunConfig
from residua.train.health import TrainingStopped
from residua.train.step import Step
from residua.train.world import SharedWorld, graph_of
from tests.distributed.launch import start
from tests.train.conftest import Lab
from tests.train.test_resume import assert_same_run

pytestmark = pytest.mark.slow

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


def shared(lab: Lab, order: str, out: str, world: SharedWorld | None = None, **settings: Any) -> SharedWorld:
    """Train the named runs in turn in one world."""
    world = world or SharedWorld(torch.device("cpu"))
    for name in order.split():
        lab.train(*RUNS[name], out=f"{out}/{name}", world=world, **settings)
    return world


def separate(lab: Lab, name: str) -> Path:
    """The same run with everything rebuilt."""
    torch.compiler.reset()
    lab.train(*RUNS[name], out=f"alone/{name}")
    return lab / "alone" / name


@pytest.mark.parametrize("changes", MODELS)
def test_runs_that_share_a_step_equal_separate_ones_in_any_order(lab: Lab, changes: list[str]) -> None:
    lab.config = lab.config.override([*changes, "train.steps=4"])
    shared(lab, "fast long", "shared")
    shared(lab, "long fast", "turned")
    for name in ("fast", "long"):
        alone = separate(lab, name)
        assert_same_run(lab / "shared" / name, alone)
        assert_same_run(lab / "turned" / name, alone)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_runs_on_one_compiled_step_equal_separate_ones(lab: Lab, monkeypatch, backend: str) -> None:
    if backend != "inductor":  # traced and guarded in the same way, without minutes of C++ compilation
        plain = partial(torch.compile, dynamic=False, backend=backend)
        monkeypatch.setattr("residua.train.losses.compile_rewritten", plain)
    changes = ["train.compile=on", "train.steps=2", "train.schedule.warmup=1", "model.layers=1"]
    lab.config = lab.config.override(changes)
    world = SharedWorld(torch.device("cpu"))
    world.rehearse(lab.config)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled > 0
    shared(lab, "one zero", "shared", world)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert_same_run(lab / "shared" / "zero", separate(lab, "zero"))


def test_shared_run_equals_one_in_its_own_process(lab: Lab) -> None:
    shared(lab, "one zero", "shared")
    source, out = lab / "run.toml", lab / "own"
    source.write_text(lab.config.to_toml())
    (own,) = start(1, "tests.soak.rank", "train", str(source), "--out", str(out))
    said = own.wait()
    assert own.process.exitcode == 0, said
    assert_same_run(lab / "shared" / "zero", out)


def test_broken_or_interrupted_run_does_not_affect_the_next(lab: Lab) -> None:
    alone, world = separate(lab, "one"), SharedWorld(torch.device("cpu"))
    broken = ["train.optimizer.lr=1e30", "train.log_every=1"]
    lab.refuse(None, *broken, error=TrainingStopped, out="broken", world=world)
    shared(lab, "one", "after", world)
    assert_same_run(lab / "after" / "one", alone)

    lab.stop(3, *RUNS["one"], out="resumed/one", number=signal.SIGTERM, world=world)
    shared(lab, "zero", "between", world)
    shared(lab, "one", "resumed", world, resume=True)
    assert_same_run(lab / "resumed" / "one", alone)


def test_step_is_built_once_for_a_graph_and_again_for_another(config: RunConfig) -> None:
    world = SharedWorld(torch.device("cpu"))
    first = world.build_step(config)
    assert all(world.build_step(config.override(changes)) is first for changes in RUNS.values())
    assert world.build_step(config.override(["model.layers=1"])) is not first


@pytest.mark.parametrize(
    "change",
    ["train.z_loss=0", "train.micro_batch=4", "train.compile=on", "data.sequence=8", "model.norm.kind=gatednorm"],
)
def test_settings_seen_by_the_compiler_are_part_of_the_graph(config: RunConfig, change: str) -> None:
    assert graph_of(config.override([change])) != graph_of(config)


def test_callback_runs_after_a_run_is_trained_and_saved(lab: Lab) -> None:
    world = SharedWorld(torch.device("cpu"))
    saved: list[list[str]] = []
    world.trained = lambda: saved.append(sorted(path.name for path in (lab / "zero" / "checkpoints").iterdir()))
    shared(lab, "zero", ".", world)
    assert saved == [["step-4", "step-6"]]
    assert isinstance(world.build_step(lab.config), Step)
    startup = lab.sessions("zero")[0]["startup"]  # where the time before its first step went
    assert startup.keys() == {"data", "build"} and all(seconds >= 0 for seconds in startup.values())
