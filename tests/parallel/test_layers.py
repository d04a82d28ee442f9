"""Layers that are gathered one by one and compiled one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from residua.train.parallel import layers
from residua.train.parallel.alone import one_rank
from residua.train.parallel.step import build_ranked_step
from tests.parallel.cases import run_config
from tests.parallel.compare import assert_same_training
from tests.parallel.worker import make, single, trace


def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, backend="aot_eager")


def test_like_layers_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own code at once, and none counts as a recompilation of another."""
    monkeypatch.setattr(layers, "compile_rewritten", compiled)
    factors = [torch.nn.Linear(1, 1, bias=i == 0) for i in range(3)]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for factor in factors:
            x = torch.ones(1, 1)
            torch.testing.assert_close(layers.compile_apart(factor.forward)(x), factor(x))
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "sublayers"])
@pytest.mark.parametrize("model", ["additive", "mgr", "moe"])
def test_compiled_layers_train_as_one_process(model: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "compile_rewritten", compiled)
    config = run_config(model, recompute=recompute, compile="on")
    limits = torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)
    with limits, one_rank(torch.device("cpu"), config.parallel) as mesh:
        seen = trace(build_ranked_step(make(config), config, mesh, "shard"), 0, 1)
    torch.compiler.reset()
    assert_same_training(seen, single(model, recompute=recompute))
