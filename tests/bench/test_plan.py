"""The planner on paper against what was measured and what stages really send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.bench.plan import GIB, Machine, MeshPlan, plan
from residua.cli.bench import app
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from tests.distributed.cases import MODELS, run_config

pytestmark = pytest.mark.slow  # torch.distributed.pipelining takes seconds to import

H200 = Machine(140 * GIB, 500e12, 300e9)


@pytest.mark.parametrize(
    ("preset", "changes", "gib"),
    [
        ("mgr-s-prenorm", ["train.micro_batch=32", "train.accumulate=4"], 13.16),
        ("mgr-l-prenorm", ["train.micro_batch=16", "train.accumulate=4"], 32.26),
        ("mgr-s-full", ["train.micro_batch=32", "train.accumulate=4"], 14.33),
        ("mgr-s-competitive4", ["train.micro_batch=32", "train.accumulate=4"], 16.23),
        ("mgr-l-competitive4", ["train.micro_batch=16", "train.accumulate=4"], 40.49),
    ],
)
def test_memory_on_one_device_is_what_was_measured(preset: str, changes: list[str], gib: float) -> None:
    """Peaks of `residua bench step` on an H200, docs/results/step.md."""
    (alone,) = plan(RunConfig.find(preset).override(changes), 1, H200)
    assert alone.memory / GIB == pytest.approx(gib, rel=0.03)


MEASURED = {
    "mgr-s-block4": 1.076,
    "mgr-s-full": 1.126,
    "mgr-s-competitive4": 1.152,
    "mgr-l-block4": 1.058,
    "mgr-l-full": 1.161,
    "mgr-l-competitive4": 1.152,
}


@pytest.mark.parametrize("preset", MEASURED)
def test_what_depth_costs_on_one_device_is_about_what_was_measured(preset: str) -> None:
    """Ratios to the additive step on an H200, docs/scale.md."""
    changes = [f"train.micro_batch={32 if '-s-' in preset else 16}", "train.accumulate=4"]
    baseline = f"{preset[:5]}-prenorm"
    (additive,), (deep,) = (plan(RunConfig.find(name).override(changes), 1, H200) for name in (baseline, preset))
    assert additive.depth == 0
    assert deep.seconds / additive.seconds == pytest.approx(MEASURED[preset], abs=0.02)


@pytest.mark.parametrize("model", MODELS)
def test_every_topology_has_a_cost(model: str) -> None:
    """Only an additive one none; in a memory that is twice as fast it is half."""
    slow, fast = (plan(run_config(model), 1, replace(H200, bandwidth=rate))[0] for rate in (1e12, 2e12))
    topology = run_config(model).model.topology.kind
    assert (slow.depth > 0) == (topology != "additive")
    assert slow.seconds - slow.depth == pytest.approx(fast.seconds - fast.depth)
    assert slow.depth == pytest.approx(2 * fast.depth)


def found(plans: list[MeshPlan], **axes: int) -> MeshPlan:
    return next(p for p in plans if all(getattr(p.parallel, axis) == size for axis, size in axes.items()))


def test_meshes_multiply_to_the_number_of_devices() -> None:
    plans = plan(run_config("full"), 4, H200)
    assert {p.parallel.ranks for p in plans} == {4}
    assert len({(p.parallel.data, p.parallel.shard, p.parallel.pipeline, p.parallel.stages) for p in plans}) == len(
        plans
    )


def test_sharding_divides_the_states() -> None:
    plans = plan(RunConfig.find("mgr-s-prenorm"), 4, H200)
    assert found(plans, shard=4).states < found(plans, data=4).states / 3


def test_stages_send_what_the_tests_of_two_ranks_count() -> None:
    """Full, P = V = 2, N_p = 2: 6 blocks and the embedding, forward and backward, in bf16 here."""
    planned = found(plan(run_config("full"), 2, H200), pipeline=2, stages_per_rank=2)
    block = 2 * 6 * 16 * 2 * 4
    assert planned.stage_bytes * 2 == 2 * 7 * block


def test_a_model_that_is_too_large_is_said_to_be() -> None:
    small = Machine(1 * GIB, 450e12, 300e9)
    assert not any(p.fits for p in plan(RunConfig.find("mgr-l-prenorm"), 8, small))


def test_a_number_of_devices_that_divides_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mesh of 7 GPUs divides"):
        plan(run_config("additive"), 7, H200)


def test_the_command_prints_meshes_and_the_way_to_start_one(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", "tiny-block", "train.accumulate=4", "--gpus", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "torchrun --nproc-per-node 2" in result.output
    assert {p["parallel"]["pipeline"] for p in json.loads(out.read_text())["plans"]} == {1, 2}
