"""Two ranks train as one process does: same losses, gradients and weights, however the model is divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import residua
from residua.distributed.pipeline.transport import cached_blocks, naive_blocks
from tests.distributed.cases import ACCUMULATE, LENGTH, MICRO_BATCH, MIXTURES, MODELS, STEPS, deep_config
from tests.distributed.compare import TOLERANCE, WEIGHT_TOLERANCE, assert_same_training
from tests.distributed.launch import launch

pytestmark = pytest.mark.slow

INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"data": 2},
    "fsdp": {"shard": 2},
    "1f1b": {"pipeline": 2},
    "interleaved": INTERLEAVED,
}
EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "scalars": ("hyper", {"shard": 2}),
    "naive": ("full", {**INTERLEAVED, "transport": "naive"}),
    "dense": ("dense", INTERLEAVED),
    "interleaved-biased-experts": ("biased", INTERLEAVED),
    "exo-sent": ("exoformer", {**INTERLEAVED, "anchors": "send"}),
    "exo-in-sources": ("exo-block", INTERLEAVED),
    "recomputed-stages": ("block", {"pipeline": 2, "recompute": "sublayers"}),
    "inside-a-layer": ("mgr", {**INTERLEAVED, "cuts": [1, 3, 6]}),
    "half-a-tied-head": ("full", {"pipeline": 2, "cuts": [11], "pieces": 4}),
    "ddp-in-turns": ("additive", {"data": 2, "turn": 1}),
    "fsdp-in-turns": ("additive", {"shard": 2, "turn": 1}),
    "divided-experts": ("moe", {"shard": 2, "experts": 2}),
}


EXTRA_NIGHTLY: dict[str, tuple[str, dict[str, Any]]] = {
    "inside-a-block": ("block", {**INTERLEAVED, "cuts": [1, 4, 7]}),
    "inside-an-anchored-layer": ("nures", {"pipeline": 2, "cuts": [1]}),
    "half-a-head": ("additive", {"pipeline": 2, "cuts": [10], "pieces": 4}),
    "nures": ("nures", INTERLEAVED),
    "head-alone": ("exo-block", {"pipeline": 2, "cuts": [8]}),
    "fsdp-model": ("full", {"shard": 2, "unit": "model"}),
    "equal-work": ("block", {"pipeline": 2, "split": "work"}),
    "two-layer-units": ("exo-block", {"shard": 2, "smallest_unit": 3000}),
    "gpipe": ("block", {"pipeline": 2, "schedule": "gpipe"}),
    "inside-a-dense-layer": ("dense", {**INTERLEAVED, "cuts": [1, 4, 7]}),
    "head-in-three": ("mgr", {**INTERLEAVED, "cuts": [7, 9, 10], "pieces": 4}),
    "experts": ("moe", {"data": 2}),
    "sharded-experts": ("moe", {"shard": 2}),
    "biased-experts": ("biased", {"data": 2}),
    "sharded-biased-experts": ("biased", {"shard": 2}),
}
"""Further units, schedules, stages that end inside a layer or in the head, and mixtures."""

COMPILED = {"pipeline": 2, "layers": 2, "compile": "on"}
SINGLE: dict[str, tuple[str, dict[str, Any]]] = {
    "rounded": ("mgr", {"shard": 2, "unit": "model", "precision": "bfloat16"}),
    "compiled-stages": ("full", COMPILED | {"backend": "eager"}),
    "rounded-stages": ("full", {**INTERLEAVED, "precision": "bfloat16"}),
}
"""Cases with a test of their own."""

SAME_STEP = {"load": "same_step", "weight": 1.0}
MIXED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "measured-stages": ("moe", {"pipeline": 2}, {"balance": SAME_STEP}),
}
"""Mixtures of experts with settings that one process has too."""
MIXED_NIGHTLY = {
    "crowded-experts": ("moe", {"shard": 2, "experts": 2}, {"crowded": True}),
    "recomputed-experts": ("moe", {"shard": 2, "experts": 2}, {"recompute": "sublayers"}),
    "pipelined-experts": ("moe", {"pipeline": 2}, {"layers": 4}),
}

BUILT: dict[str, dict[str, Any]] = {
    "built-shards": {"shard": 2},
    "built-experts": {"shard": 2, "experts": 2},
    "built-stages": {"pipeline": 2},
}
"""Ways to divide a model that is built and not trained."""

GRID = [(model, way) for model in ("additive", "full", "block", "mgr", "mhc", "exoformer") for way in WAYS]
NORMAL = [
    *(("additive", way) for way in ("ddp", "fsdp", "1f1b")),
    ("full", "ddp"),  # the deferred backward under DDP's hooks
    *((model, way) for model in ("full", "block") for way in ("1f1b", "interleaved")),
    ("mgr", "fsdp"),  # a state that is bound to the process
    ("mgr", "interleaved"),  # stage boundaries inside the fill phase and after it
    ("exoformer", "interleaved"),
]
"""What `make test` runs of the grid: one pair per kind of fault. `make nightly` runs the rest."""
NIGHTLY = [pair for pair in GRID if pair not in NORMAL]


def train(out: Path, pairs: list[tuple[str, str]], cases: dict[str, tuple[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """What two ranks computed in all these cases, in one start."""
    all_cases = {f"{model}-{way}": (model, WAYS[way]) for model, way in pairs} | cases
    launch(2, "tests.distributed.worker", out, [(name, *case) for name, case in all_cases.items()], again=True)
    return {name: load_file(out / f"{name}.safetensors") for name in all_cases}


def mixed(cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (model, {**parallel, **recipe}) for name, (model, parallel, recipe) in cases.items()}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    built = {name: ("moe", {**parallel, "built": True}) for name, parallel in BUILT.items()}
    return train(tmp_path_factory.mktemp("traces"), NORMAL, EXTRA | SINGLE | mixed(MIXED) | built)


@pytest.fixture(scope="module")
def nightly_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    differentiated = ("full", COMPILED | {"backend": "aot_eager"})
    extra = {"differentiated-stages": differentiated} | mixed(MIXED_NIGHTLY) | EXTRA_NIGHTLY
    return train(tmp_path_factory.mktemp("traces"), NIGHTLY, extra)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    from tests.distributed.worker import single

    return {model: single(model) for model in MODELS}


@pytest.mark.parametrize(("model", "way"), NORMAL)
def test_two_ranks_train_as_one(traces: Any, alone: Any, model: str, way: str) -> None:
    assert_same_training(traces[f"{model}-{way}"], alone[model])


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "way"), NIGHTLY)
def test_two_ranks_train_as_one_in_the_rest_of_the_grid(nightly_traces: Any, alone: Any, model: str, way: str) -> None:
    trace = nightly_traces[f"{model}-{way}"]
    assert_same_training(trace, alone[model])
    assert trace.get("kept", 0) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXTRA_NIGHTLY)
def test_further_divisions_train_as_one(nightly_traces: Any, alone: Any, name: str) -> None:
    model, _ = EXTRA_NIGHTLY[name]
    assert_same_training(nightly_traces[name], alone[model], TOLERANCE if model in MIXTURES else WEIGHT_TOLERANCE)


@pytest.mark.parametrize("name", EXTRA)
def test_other_divisions_train_as_one(traces: Any, alone: Any, name: str) -> None:
    model, _ = EXTRA[name]
    assert_same_training(traces[name], alone[model], TOLERANCE if model in MIXTURES else WEIGHT_TOLERANCE)


@pytest.mark.parametrize("name", MIXED)
def test_mixtures_train_as_one(traces: Any, name: str) -> None:
    from tests.distributed.worker import single

    model, _, recipe = MIXED[name]
    assert_same_training(traces[name], single(model, **recipe), weights=TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MIXED_NIGHTLY)
def test_other_mixtures_train_as_one(nightly_traces: Any, name: str) -> None:
    """Also if every token goes to the experts of one rank, and none to the other's."""
    from tests.distributed.worker import single

    model, _, recipe = MIXED_NIGHTLY[name]
    # crowded routers start at zero, so their weights are updates of Muon and nothing else
    weights = WEIGHT_TOLERANCE if "crowded" in recipe else TOLERANCE
    assert_same_training(nightly_traces[name], single(model, **recipe), weights)


@pytest.mark.parametrize("name", BUILT)
def test_a_rank_builds_its_share_with_one_layer_more_at_most(traces: Any, name: str) -> None:
    """And the ranks together have the weights of one process, bit for bit."""
    from tests.distributed.live import size

    torch.manual_seed(0)
    model, trace = residua.build(deep_config("moe").model), traces[name]
    for key, weight in model.named_parameters():
        assert torch.equal(trace[f"weight/{key}"], weight), key
    layer = size(model.sublayers[0]) + size(model.sublayers[1])
    assert trace["share/0"] + trace["share/1"] == pytest.approx(size(model), rel=0.01)
    for rank in (0, 1):
        assert trace[f"peak/{rank}"] <= trace[f"share/{rank}"] + 1.03 * layer < 0.7 * size(model)


def test_working_copies_of_a_gathered_model_give_the_gradients_of_one_process(traces: Any) -> None:
    """In the first step. Later, weights that differ in the last bits may round differently in bfloat16."""
    from tests.distributed.worker import single

    first = {key: value for key, value in single("mgr", precision="bfloat16").items() if key.startswith("0/")}
    assert_same_training({key: traces["rounded"][key] for key in first}, first)


def test_compiled_stages_train_as_one(traces: Any) -> None:
    """Each of the two stages has a graph with gradients and one without."""
    from tests.distributed.worker import single

    assert_same_training(traces["compiled-stages"], single("full", layers=2))
    assert (traces["compiled-stages"]["graphs"], traces["full-1f1b"]["graphs"]) == (4, 0)


@pytest.mark.nightly
def test_stages_that_are_differentiated_ahead_of_time_train_as_one(nightly_traces: Any) -> None:
    """By day layers are, in another test."""
    from tests.distributed.worker import single

    assert_same_training(nightly_traces["differentiated-stages"], single("full", layers=2))
    assert nightly_traces["differentiated-stages"]["graphs"] == 4


def test_stages_recompute_every_sublayer(traces: Any) -> None:
    """In each micro-batch of two steps and a validation. Another test checks that they train as one process does."""
    passes = (STEPS + 1) * ACCUMULATE
    assert (traces["recomputed-stages"]["checkpointed"], traces["block-1f1b"]["checkpointed"]) == (8 * passes, 0)


def test_stages_in_bfloat16_compute_the_gradients_of_one_process(traces: Any) -> None:
    """Up to rounding, which accumulates over depth to 2 % of the smallest ones. Half as many bytes are sent."""
    from tests.distributed.worker import single

    first = {key: value for key, value in single("full", precision="bfloat16").items() if key.startswith("0/")}
    for name, expected in first.items():
        error = (traces["rounded-stages"][name].double() - expected.double()).norm()
        assert error <= 0.03 * expected.double().norm(), name
    for way in ("bytes/forward", "bytes/backward"):
        assert traces["rounded-stages"][way] * 2 == traces["full-interleaved"][way]


def test_cached_blocks_are_sent_as_often_as_the_formula_says(traces: Any) -> None:
    """Full, 8 sublayers, P = V = 2: N_p = 2 blocks per stage, and the embedding once to the other rank."""
    block = MICRO_BATCH * LENGTH * 16 * 4 * ACCUMULATE
    sent, naive = traces["full-interleaved"], traces["naive"]
    for way in ("forward", "backward"):
        kept = (2 * 1 / 2 + (2 - 1) * 2 * (2 - 1)) * 2
        assert sent[f"bytes/{way}"] == (kept + 1) * block
        assert sent[f"bytes/{way}"] <= (cached_blocks(2, 2, 2) + 1) * block
        assert naive[f"bytes/{way}"] == (naive_blocks(2, 2, 2) + 3) * block
        assert sent[f"bytes/{way}"] < naive[f"bytes/{way}"]


def test_a_run_says_what_it_sent_and_what_the_formulas_give(traces: Any) -> None:
    """A block is 3 KiB per step. 7 are sent, 15 by sending at every hop, 12 and 10 (no embedding) by the formulas."""
    said = {name: bytes(traces[name]["notice"].tolist()).decode() for name in ("full-interleaved", "additive-1f1b")}
    assert said == {
        "full-interleaved": "pipeline sent 0.0205 MiB forward and 0.0205 MiB backward in a step; every tensor at every "
        "hop would be 0.0439 MiB; the formulas of arXiv 2603.15031, for blocks without the embedding: naive 0.0352 "
        "MiB, cached 0.0293 MiB.",
        "additive-1f1b": "pipeline sent 0.00293 MiB forward and 0.00293 MiB backward in a step; every tensor at every "
        "hop would be 0.00293 MiB.",
    }


def test_cache_and_receive_buffers_are_freed(traces: Any) -> None:
    """After two steps and a validation."""
    left = {name: int(trace["kept"]) for name, trace in traces.items() if "kept" in trace}
    assert len(left) > 12
    assert left == dict.fromkeys(left, 0)


def test_recomputed_anchors_are_not_sent(traces: Any) -> None:
    """ExoFormer sends its embedding once per rank instead of four anchors, and nothing if it is a source anyway."""
    block = MICRO_BATCH * LENGTH * 16 * 4 * ACCUMULATE
    assert traces["exoformer-interleaved"]["bytes/forward"] == (3 + 1) * block
    assert traces["exo-sent"]["bytes/forward"] == (3 + 4) * block
    assert traces["exo-in-sources"]["bytes/forward"] == traces["block-interleaved"]["bytes/forward"]


def test_a_pipeline_of_one_stage_per_rank_sends_every_block_onward(traces: Any) -> None:
    block = MICRO_BATCH * LENGTH * 16 * 4 * ACCUMULATE
    assert traces["full-1f1b"]["bytes/forward"] == (cached_blocks(2, 1, 4) + 1) * block


def test_muon_gives_the_update_of_one_process(traces: Any, alone: Any) -> None:
    """The first update starts from gradients that differ only in the last bits."""
    for way in ("ddp", "fsdp"):
        weights = {k: v for k, v in traces[f"additive-{way}"].items() if k.startswith("weight/sublayers")}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone["additive"][name], rtol=1e-4, atol=1e-5)


TURNS = [("ddp", 1), ("fsdp", 1), ("ddp-in-turns", 8), ("fsdp-in-turns", 8), ("divided-experts", 1)]


@pytest.mark.parametrize(("name", "turns"), TURNS)
def test_each_matrix_is_orthogonalised_once(traces: Any, name: str, turns: int) -> None:
    """By one of the ranks: all at once, or two at a time while the next two are being sent to their owners."""
    from tests.distributed.worker import orthogonalised, single

    with orthogonalised() as matrices:
        single("moe" if name == "divided-experts" else "additive")
    trace = traces[name if name in traces else f"additive-{name}"]
    assert (trace["matrices"], trace["turns"]) == (sum(matrices), turns * STEPS)
