"""Layers that are gathered and compiled a few at a time."""

from collections import Counter
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from residua.distributed import shard, units
from residua.distributed.mesh import one_rank
from residua.distributed.world import build_ranked_step
from tests.distributed.cases import ACCUMULATE, batches, run_config
from tests.distributed.traces import assert_same_training
from tests.distributed.worker import made, single, trace
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow


def compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False, backend="aot_eager")


def test_similar_layers_do_not_recompile_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own code, and none counts as a recompilation of another."""
    monkeypatch.setattr(units, "compile_rewritten", compiled)
    factors = [torch.nn.Linear(1, 1, bias=i == 0) for i in range(3)]
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for factor in factors:
            x = torch.ones(1, 1)
            torch.testing.assert_close(units.compile_apart(factor.forward)(x), factor(x))
    torch.compiler.reset()


def test_a_unit_has_the_fewest_layers_that_reach_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sublayers = [torch.nn.Linear(10, 10, bias=False) for _ in range(10)]
    for smallest, ends in {1: [2, 4, 6, 8, 10], 200: [2, 4, 6, 8, 10], 201: [4, 8, 10], 5000: [10]}.items():
        monkeypatch.setattr(units, "SMALLEST_UNIT", smallest)
        assert [unit.stop for unit in units.divide(sublayers)] == ends
        assert [k for unit in units.divide(sublayers) for k in unit] == list(range(10))


@pytest.mark.parametrize("shards", ["one", "several"])
def test_units_that_save_no_memory_are_gathered_once_per_step(shards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one shard that is everything; with several, all but the layers, which are gathered in every pass."""
    monkeypatch.setattr(units, "SMALLEST_UNIT", 1)
    monkeypatch.setattr(shard, "reshards", lambda mesh: shards == "several")
    gathers: Counter[Any] = Counter()
    unsharded = FSDPParamGroup._to_unsharded

    def count(group: Any) -> None:
        gathers[group] += not group.is_unsharded
        unsharded(group)

    config = run_config("additive")
    with one_rank(torch.device("cpu"), config.parallel) as mesh:
        step = build_ranked_step(made(config), config, mesh, "shard")
        step(batches(0))
        monkeypatch.setattr(FSDPParamGroup, "_to_unsharded", count)
        step(batches(1))
    assert sorted(gathers.values()) == ([1] * 5 if shards == "one" else [1] + [2 * ACCUMULATE] * 4)


def test_mixed_precision_does_not_round_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one process, where autocast rounds the operands of products only."""
    config = run_config("additive", precision="bfloat16")
    seen: set[tuple[bool, torch.dtype]] = set()

    def look(unit: units.Unit, *args: Any) -> Any:
        seen.update((parameter.dim() > 1, parameter.dtype) for parameter in unit.parameters())
        return run(unit, *args)

    run = units.Unit._run
    monkeypatch.setattr(units.Unit, "_run", look)
    with one_rank(torch.device("cpu"), config.parallel) as mesh:
        build_ranked_step(made(config), config, mesh, "shard")(batches(0))
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}


@pytest.mark.parametrize("compile", ["off", pytest.param("on", marks=pytest.mark.nightly)])
def test_a_model_gathered_as_one_unit_uses_working_copies(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one process: masters rounded once a step, gradients accumulated in float32, one graph."""
    monkeypatch.setattr(shard, "compile_rewritten", compiled)
    config = run_config("additive", {"unit": "model"}, layers=1, precision="bfloat16", compile=compile)
    with one_rank(torch.device("cpu"), config.parallel) as mesh:
        step = build_ranked_step(made(config), config, mesh, "shard")
        counters.clear()
        seen = trace(step, 0, 1)
    torch.compiler.reset()
    assert step._copies is not None
    assert counters["stats"]["unique_graphs"] == (2 if compile == "on" else 0)  # with gradients and without
    assert_same_training(seen, single("additive", layers=1, precision="bfloat16"))


COMPILED = {
    "additive": ("sublayers", "several", 3),  # units of two layers and of one, sublayers and junctions together
    "mgr": ("sublayers", "one", 2),  # a state that is bound to the process: sublayers alone
    "moe": ("none", "several", 1),  # the compiler stops at experts, and units return how they routed
}


WAYS = list(product(COMPILED, ("eager", "aot_eager")))


@pytest.mark.parametrize("way", only_nightly(WAYS, but=[("additive", "eager")]), ids="-".join)
def test_compiled_layers_train_like_one_process(way: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`eager` finds what cannot be traced, `aot_eager` also what cannot be differentiated ahead of time."""
    model, backend = way
    recompute, shards, depth = COMPILED[model]
    monkeypatch.setattr(units, "compile_rewritten", partial(torch.compile, dynamic=False, backend=backend))
    monkeypatch.setattr(units, "SMALLEST_UNIT", 3000 if depth > 2 else 1)
    monkeypatch.setattr(shard, "reshards", lambda mesh: shards == "several")
    config = run_config(model, layers=depth, recompute=recompute, compile="on")
    limits = torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit)
    with limits, one_rank(torch.device("cpu"), config.parallel) as mesh:
        seen = trace(build_ranked_step(made(config), config, mesh, "shard"), 0, 1)
    torch.compiler.reset()
    assert_same_training(seen, single(model, layers=depth, recompute=recompute))
