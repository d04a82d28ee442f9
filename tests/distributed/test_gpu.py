"""The parallel code paths on one GPU, in a world of one rank with NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import residua
from residua.config.run import RunConfig
from residua.model.decoder import build_parts
from residua.train.step import Step, build_step
from residua.train.timing import random_batches

pytestmark = pytest.mark.gpu


def losses(step: Step, config: RunConfig) -> list[float]:
    seen = []
    for _ in range(3):
        step(random_batches(config), 0.01)
        seen.append(step.totals().loss)
        step.set_totals([0.0] * 4)
    return seen


@pytest.mark.parametrize("way", ["replicate", "shard", "pipeline"])
@pytest.mark.parametrize("preset", ["tiny", "tiny-block", "tiny-full", "tiny-mgr", "tiny-exo"])
def test_one_rank_trains_as_no_ranks(preset: str, way: Any) -> None:
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
