"""The planner against measured memory and times, and against the real traffic of stages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from residua.bench.plan import GIB, Machine, MeshPlan, command, plan
from residua.cli.bench import app
from residua.config.run import RunConfig
from residua.config.settings import ConfigError
from residua.model.size import measure
from tests.distributed.cases import MODELS, run_config
from tests.docs.commands import load_module

pytestmark = pytest.mark.slow  # torch.distributed.pipelining takes seconds to import

ROOT = Path(__file__).parents[2]
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
def test_planned_memory_on_one_device_matches_measurements(preset: str, changes: list[str], gib: float) -> None:
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
def test_planned_depth_cost_on_one_device_matches_measurements(preset: str) -> None:
    """Ratios to the additive step on an H200, docs/lab/ranks.md."""
    changes = [f"train.micro_batch={32 if '-s-' in preset else 16}", "train.accumulate=4"]
    baseline = f"{preset[:5]}-prenorm"
    (additive,), (deep,) = (plan(RunConfig.find(name).override(changes), 1, H200) for name in (baseline, preset))
    assert additive.depth == 0
    assert deep.seconds / additive.seconds == pytest.approx(MEASURED[preset], abs=0.02)


@pytest.mark.parametrize("model", MODELS)
def test_every_topology_has_a_cost(model: str) -> None:
    """All but plain sums; in a memory that is twice as fast it is half."""
    slow, fast = (plan(run_config(model), 1, replace(H200, bandwidth=rate))[0] for rate in (1e12, 2e12))
    topology = run_config(model).model.topology.kind
    assert (slow.depth > 0) == (topology not in ("additive", "parallel"))
    assert slow.seconds - slow.depth == pytest.approx(fast.seconds - fast.depth)
    assert slow.depth == pytest.approx(2 * fast.depth)


def found(plans: list[MeshPlan], tensor: int = 1, context: int = 1, **axes: int) -> MeshPlan:
    asked = [p for p in plans if (p.tensor, p.context) == (tensor, context)]
    return next(p for p in asked if all(getattr(p.parallel, axis) == size for axis, size in axes.items()))


def test_meshes_multiply_to_the_number_of_devices() -> None:
    plans = plan(run_config("full"), 4, H200)
    assert {p.parallel.ranks for p in plans} == {4}
    meshes = {(p.parallel.data, p.parallel.shard, p.parallel.pipeline, p.parallel.stages) for p in plans}
    assert len(meshes) == len(plans)


def test_sharding_divides_the_states() -> None:
    plans = plan(RunConfig.find("mgr-s-prenorm"), 4, H200)
    assert found(plans, shard=4).held.states < found(plans, data=4).held.states / 3


def test_planned_stage_traffic_matches_the_two_rank_tests() -> None:
    """Full, P = V = 2, N_p = 2: 6 blocks and the embedding, forward and backward, in bf16 here."""
    planned = found(plan(run_config("full"), 2, H200), pipeline=2, stages_per_rank=2)
    block = 2 * 6 * 16 * 2 * 4
    assert planned.sent.stages * 2 == 2 * 7 * block


def test_outermost_group_is_gathered_once_per_step() -> None:
    config = RunConfig.find("mgr-s-prenorm").override(["train.accumulate=8"])
    size = measure(config.model)
    sent = found(plan(config, 2, H200), shard=2).sent
    layers = size.attention + size.ffn
    assert sent.layers == pytest.approx((2 + 2 + 4) * layers / 2 * 4)
    assert sent.root == pytest.approx((4 + 4) * (size.parameters - layers) / 2)


def test_group_speed_follows_its_links_or_network_cards() -> None:
    machine = Machine(140 * GIB, 500e12, 300e9, between=20e9, node=8, latency=1e-3)
    assert machine.group(8, 1).ring(300e9) == pytest.approx(1 + 1e-3)
    assert machine.group(4, 2).nodes == 1 and machine.group(2, 8).nodes == 2 and machine.group(4, 4).nodes == 2
    # 16 ranks on two nodes use 8 cards at once; 2 ranks on two nodes one each
    assert machine.group(16, 1).ring(160e9) == pytest.approx(1 + 2e-3)
    assert machine.group(2, 8).ring(20e9) == pytest.approx(1 + 2e-3)
    assert machine.group(2, 8).hop(20e9) == pytest.approx(1 + 1e-3)
    # half of the exchange among 16 ranks leaves the node
    assert machine.group(16, 1).exchange(40e9) == pytest.approx(1 + 1e-3)
    assert machine.group(1, 1).ring(1e9) == machine.group(1, 1).exchange(1e9) == 0.0


def test_slow_network_slows_only_meshes_across_nodes() -> None:
    config = RunConfig.find("mgr-s-prenorm").override(["train.accumulate=16"])
    fast, slow = (plan(config, 16, replace(H200, between=rate)) for rate in (1e12, 1e9))
    assert found(slow, data=16).seconds > 2 * found(fast, data=16).seconds
    inside = plan(config, 8, replace(H200, between=1e9))
    assert found(inside, data=8).seconds == found(plan(config, 8, H200), data=8).seconds


def test_every_message_costs_its_latency() -> None:
    config = RunConfig.find("mgr-s-prenorm").override(["train.accumulate=16"])
    quick, late = (found(plan(config, 16, replace(H200, latency=x)), data=2, shard=8) for x in (0.0, 1.0))
    assert late.seconds > quick.seconds + 1.0


def test_a_step_takes_as_long_as_the_slowest_stage() -> None:
    """The head of mgr-l is worth three layers: equal layers make the last of 8 stages the slowest."""
    by = {}
    for split in ("work", "layers"):
        config = RunConfig.find("mgr-l-prenorm").override([f"parallel.split={split}"])
        by[split] = found(plan(config, 8, H200), pipeline=8, stages_per_rank=1)
    assert by["work"].slowest < 1.05 and by["layers"].slowest > 1.4
    slowest = by["layers"].slowest / by["work"].slowest
    assert by["layers"].seconds / by["work"].seconds == pytest.approx(slowest, rel=0.02)


def test_first_pipeline_rank_has_more_in_flight() -> None:
    config = RunConfig.find("mgr-l-prenorm")
    planned = found(plan(config, 4, H200), pipeline=4, stages_per_rank=1)
    alone = found(plan(config, 1, H200), pipeline=1)
    assert planned.memory < alone.memory
    assert planned.held.activations > alone.held.activations / 2


def test_node_too_small_for_its_checkpoint_does_not_fit() -> None:
    config = RunConfig.find("mgr-l-prenorm")
    (alone,) = plan(config, 1, H200)
    parameters = measure(config.model).parameters
    assert 8 * parameters < alone.host < 16 * parameters
    assert not plan(config, 1, replace(H200, host=alone.host / 2))[0].fits


def test_tensor_and_context_traffic_follows_the_equations() -> None:
    """12 layers of width 768 with 6 heads, 8 × 1024 tokens in each of 4 micro-batches."""
    changes = ["train.accumulate=4", "train.micro_batch=8", "data.sequence=2048"]
    plans = plan(RunConfig.find("mgr-s-prenorm").override(changes), 2, H200, engines=True)
    tokens, width, micro = 8 * 2048, 768, 4
    tensor = found(plans, tensor=2, data=1).sent
    # gather and reduce around 24 sublayers and the two ends, forward and backward, half of [tokens, C] each
    assert tensor.tensor == micro * 25 * 4 * (tokens * width * 2 / 2)
    context = found(plans, context=2, data=1).sent
    # keys and values of half the tokens are passed on once forward, and with their gradients once backward
    assert context.context == micro * 12 * 3 * (2 * tokens / 2 * width * 2)
    assert (tensor.context, context.tensor) == (0, 0)
    assert found(plans, data=2).sent.tensor == 0


def test_tensor_parallelism_divides_states_and_activations() -> None:
    plans = plan(RunConfig.find("mgr-s-prenorm"), 2, H200, engines=True)
    alone = plan(RunConfig.find("mgr-s-prenorm"), 1, H200)[0].held
    divided = found(plans, tensor=2, data=1).held
    assert divided.states == pytest.approx(alone.states / 2)
    assert divided.activations == pytest.approx(alone.activations / 2)


def test_divided_experts_send_tokens_instead_of_weights() -> None:
    """4 layers of 4 gated experts of width 8, of which a token visits 2; 12 tokens of width 16 in 2 micro-batches."""
    plans = plan(run_config("moe"), 2, H200)
    gathered, divided = (found(plans, shard=2, experts=n) for n in (1, 2))
    experts = 4 * 4 * 3 * 8 * 16
    # to the experts and back, forward and backward, half of the 24 rows of each micro-batch
    assert divided.sent.tokens == 2 * 4 * 4 * (24 / 2 * 16 * 2)
    assert divided.sent.token_exchanges == 2 * 4 * 5
    assert gathered.sent.layers - divided.sent.layers == pytest.approx(8 * experts / 2 * 2)
    assert (gathered.sent.tokens, divided.sent.experts) == (0, 0)
    assert divided.held.states == gathered.held.states
    assert divided.held.gathered < gathered.held.gathered
    assert "parallel.experts=2" in command(divided, ["tiny-moe"], nodes=1)
    four = found(plan(run_config("moe"), 4, H200), shard=4, experts=2).sent
    assert four.experts == pytest.approx(8 * experts / 2 * (2 - 1) / 2)
    assert {p.parallel.experts for p in plan(run_config("additive"), 2, H200)} == {1}


def test_a_model_that_is_too_large_is_reported() -> None:
    small = Machine(1 * GIB, 450e12, 300e9)
    assert not any(p.fits for p in plan(RunConfig.find("mgr-l-prenorm"), 8, small))


def test_a_device_count_without_a_mesh_is_refused() -> None:
    with pytest.raises(ConfigError, match="no mesh of 7 GPUs divides"):
        plan(run_config("additive"), 7, H200)


def test_the_command_prints_meshes_and_how_to_launch_one(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", "tiny-block", "train.accumulate=4", "--gpus", "2", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "torchrun --nproc-per-node 2" in result.output
    assert {p["parallel"]["pipeline"] for p in json.loads(out.read_text())["plans"]} == {1, 2}


@pytest.mark.parametrize(
    ("anchors", "moves"), [("lime", True), ("resformer", True), ("cla", False), ("prenorm", False)]
)
def test_the_command_says_that_times_ignore_bytes_of_anchors(anchors: str, moves: bool) -> None:
    result = CliRunner().invoke(app, ["plan", "tiny", anchors, "--gpus", "1"])
    assert result.exit_code == 0, result.output
    assert (f"step ms leaves out the bytes that anchors.kind = '{anchors}' moves" in result.output) == moves


def test_the_command_names_the_nodes_and_the_engine() -> None:
    config = RunConfig.find("mgr-s-prenorm").override(["train.accumulate=16"])
    plans = plan(config, 16, H200, engines=True)
    ours = command(found(plans, data=2, shard=8), ["mgr-s-prenorm", "train.accumulate=16"], nodes=2)
    meeting = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8"
    axes = "parallel.data=2 parallel.shard=8 parallel.pipeline=1"
    assert ours == f"torchrun {meeting} --no-python residua train mgr-s-prenorm train.accumulate=16 {axes}"
    theirs = command(found(plans, tensor=2, data=1, shard=8), ["mgr-s-prenorm"], nodes=2)
    assert theirs == (
        f"torchrun {meeting} -m torchtitan.train --module residua.integrations.torchtitan --config "
        '"mgr-s-prenorm parallel.data=1 parallel.shard=8 parallel.pipeline=1" --parallelism.tensor_parallel_degree 2'
    )


@pytest.mark.nightly
def test_documented_plans_match_make_scale() -> None:
    assert "\n".join(load_module("tools/scale.py").lines()) in (ROOT / "docs" / "lab" / "plans.md").read_text("utf-8")


def test_the_table_has_the_fastest_mesh_per_size_and_engine() -> None:
    models = {"tiny": run_config("additive", accumulate=4096, micro_batch=1)}
    lines = list(load_module("tools/scale.py").scale_tables(models, H200))
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == ["8", "64", "512", "4096"]
