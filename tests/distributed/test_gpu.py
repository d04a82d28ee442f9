"""The parallel code paths on one GPU, in a world of one rank with NCCL."""

import resource
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import residua
from residua.config import choices
from residua.config.run import ParallelConfig, RunConfig
from residua.model.decoder import build_parts
from residua.storage.shard_files import local
from residua.train.step import Step, build_step
from residua.train.timing import random_batches
from tests.ops.harness import assert_equal

pytestmark = pytest.mark.gpu


def losses(step: Step, config: RunConfig) -> list[float]:
    seen = []
    for _ in range(3):
        step(random_batches(config), 0.01)
        seen.append(step.totals().loss)
        step.set_totals([0.0] * 4)
    return seen


@pytest.mark.parametrize("way", ["replicate", "shard", "pipeline"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-block", "tiny-full", "tiny-mgr", "tiny-exo", "tiny-moe"])
def test_one_rank_trains_like_one_process(preset: str, way: Any) -> None:
    from residua.distributed.mesh import one_rank
    from residua.distributed.world import build_ranked_step

    device = torch.device("cuda")
    config = RunConfig.find(preset).override(["train.micro_batch=2", "train.accumulate=2", "train.compile=off"])
    torch.manual_seed(0)
    expected = losses(build_step(residua.build(config.model), config.train, device), config)
    with one_rank(device, config.parallel) as mesh:
        torch.manual_seed(0)
        got = losses(build_ranked_step(build_parts(config.model), config, mesh, way), config)
    assert got == pytest.approx(expected, rel=2e-3)


def test_building_a_gpu_model_holds_only_one_layer_on_the_host() -> None:
    """481 M parameters in 12 layers of 153 MiB. A process that held more before shows a smaller rise."""
    from residua.distributed.mesh import one_rank
    from residua.distributed.world import build_ranked_step

    wide = ["model.width=2048", "model.layers=12", "model.ffn.hidden=5632", "train.compile=off"]
    config = RunConfig.find("tiny").override(wide)
    with one_rank(torch.device("cuda"), config.parallel) as mesh:
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        model = build_ranked_step(build_parts(config.model), config, mesh, "shard").model
        rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    layer = 4 * sum(p.numel() for sublayer in model.sublayers[:2] for p in sublayer.parameters())
    seconds = time.perf_counter() - started
    print(f"host memory rose by {rise / 2**20:.0f} MiB, a layer has {layer / 2**20:.0f} MiB, built in {seconds:.1f} s")
    assert rise < 1.5 * layer


@pytest.mark.parametrize("rows", [0, 512])
def test_divided_experts_compute_the_same_as_whole_experts(rows: int) -> None:
    """The exchange with NCCL, of this rank with itself; also if no row arrives."""
    from residua.distributed.mesh import one_rank
    from residua.model.moe import Experts
    from tests.distributed.test_experts import divided

    table = choices.MoE(hidden=64, experts=8, top_k=2)
    whole = Experts(table, 128, std=0.05, output_std=0.05).cuda()
    x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
    ends = (torch.arange(1, 9, device="cuda") * (rows // 8)).int()
    with one_rank(torch.device("cuda"), ParallelConfig()) as mesh:
        alone: Any = SimpleNamespace(
            config=SimpleNamespace(experts=1, slices=1, shard=1, data=1), shards=mesh.shards, experts=dist.group.WORLD
        )
        apart, found = divided(whole, alone, torch.bfloat16), []
        for experts in (whole, apart):
            given = x.clone().requires_grad_()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                y = experts(given, ends)
            y.float().square().sum().backward()
            found.append([y, given.grad, *(local(p.grad) for p in experts.parameters() if p.grad is not None)])
    assert_equal(*found)
