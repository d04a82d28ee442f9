"""Two ranks train as one process does: same losses, gradients and weights, however the model is divided."""

import json
from typing import Any

import pytest
import torch

import residua
from residua.distributed.pipeline.transport import cached_blocks, naive_blocks
from tests.distributed.cases import ACCUMULATE, STEPS, deep_config
from tests.distributed.traces import BLOCK, INTERLEAVED, Cases, Traces, alone, assert_same_training, regular_and_nightly

pytestmark = pytest.mark.slow

FP8: dict[str, Any] = {"precision": "fp8_emulated"}
HEAD = FP8 | {"low_precision": {"head": True}}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"data": 2},
    "fsdp": {"shard": 2},
    "1f1b": {"pipeline": 2},
    "interleaved": INTERLEAVED,
}
EXTRA: Cases = {
    "recomputed-stages": ("block", {"pipeline": 2, "recompute": "sublayers"}),
    "fsdp-in-turns": ("additive", {"shard": 2, "turn": 1}),
    "naive": ("full", {**INTERLEAVED, "transport": "naive"}),
    "token-ids": ("token_gain", INTERLEAVED),
    "shared-heads": ("cla", INTERLEAVED),
    "heads-of-all-layers": ("lime", INTERLEAVED),
    "reads": ("mudd", INTERLEAVED),
    "loop": ("loop", {"data": 2}),
    "loop-in-stages": ("injection", INTERLEAVED),
    "reads-inside-a-layer": ("dca", {**INTERLEAVED, "cuts": [1, 4, 7]}),
    "sharded-rates": ("x0", {"shard": 2}),  # a separate group for the factor of λ
    "interleaved-biased-experts": ("biased", INTERLEAVED),
    "exo-sent": ("exoformer", {**INTERLEAVED, "anchors": "send"}),
    "exo-in-sources": ("exo-block", INTERLEAVED),
    "inside-a-layer": ("mgr", {**INTERLEAVED, "cuts": [1, 3, 6]}),
    "inside-a-parallel-layer": ("places", {**INTERLEAVED, "cuts": [1, 4, 6]}),
    "rates-of-others": ("x0", {"pipeline": 2, "cuts": [8]}),  # the last rank has no gradient of λ of its own
    "unread-embedding": ("x0", {**INTERLEAVED, "cuts": [2, 3, 4]}),  # stage 1 only keeps it for stage 3
    "half-a-tied-head": ("full", {"pipeline": 2, "cuts": [11], "pieces": 4}),
    "ddp-in-turns": ("additive", {"data": 2, "turn": 1}),
    "divided-experts": ("moe", {"shard": 2, "experts": 2}),
    "measured-stages": ("moe", {"pipeline": 2, "balance": {"load": "same_step", "weight": 1.0}}),
}
EXTRA_NIGHTLY: Cases = {
    "scalars": ("hyper", {"shard": 2}),
    "gated-values": ("gated-values", INTERLEAVED),
    "sent-reads": ("value_input", {**INTERLEAVED, "cuts": [1, 4, 6]}),
    "value-embeddings": ("value-embeddings", INTERLEAVED),
    "sharded-token-ids": ("token_gain", {"shard": 2}),
    "sharded-reads": ("dca", {"shard": 2}),
    "gathered-loop": ("loop", {"shard": 2, "unit": "model"}),
    "dense": ("dense", INTERLEAVED),
    "values-of-all-layers": ("depth_attention", INTERLEAVED),
    "shared-values": ("svformer", INTERLEAVED),
    "inside-a-block": ("block", {**INTERLEAVED, "cuts": [1, 4, 7]}),
    "inside-an-anchored-layer": ("nures", {"pipeline": 2, "cuts": [1]}),
    "half-a-head": ("additive", {"pipeline": 2, "cuts": [10], "pieces": 4}),
    "nures": ("nures", INTERLEAVED),
    "head-alone": ("exo-block", {"pipeline": 2, "cuts": [8]}),
    "fsdp-model": ("full", {"shard": 2, "unit": "model"}),
    "equal-work": ("block", {"pipeline": 2, "split": "work"}),
    "two-layer-units": ("exo-block", {"shard": 2, "smallest_unit": 3000}),
    "gpipe": ("block", {"pipeline": 2, "schedule": "gpipe"}),
    "x0": ("x0", INTERLEAVED),
    "rates": ("x0", {"data": 2}),
    "sharded-places": ("places", {"shard": 2}),
    "resi_dual": ("resi_dual", INTERLEAVED),
    "delta": ("delta", {"pipeline": 2, "cuts": [3]}),
    "delta-head-alone": ("delta", {"pipeline": 2, "cuts": [8]}),
    "gated": ("gated", INTERLEAVED),
    "inside-a-dense-layer": ("dense", {**INTERLEAVED, "cuts": [1, 4, 7]}),
    "head-in-three": ("mgr", {**INTERLEAVED, "cuts": [7, 9, 10], "pieces": 4}),
    "experts": ("moe", {"data": 2}),
    "sharded-experts": ("moe", {"shard": 2}),
    "biased-experts": ("biased", {"data": 2}),
    "sharded-biased-experts": ("biased", {"shard": 2}),
    "crowded-experts": ("moe", {"shard": 2, "experts": 2, "crowded": True}),  # none for the experts of the other rank
    "recomputed-experts": ("moe", {"shard": 2, "experts": 2, "recompute": "sublayers"}),
    "pipelined-experts": ("moe", {"pipeline": 2, "layers": 4}),
}
"""Further units, schedules, stages that end inside a layer or in the head, and mixtures."""

COMPILED = {"pipeline": 2, "layers": 2, "compile": "on"}
SINGLE: Cases = {
    "rounded": ("mgr", {"shard": 2, "unit": "model", "precision": "bfloat16"}),
    "compiled-stages": ("full", COMPILED | {"backend": "eager"}),
    "rounded-stages": ("full", {**INTERLEAVED, "precision": "bfloat16"}),
}
"""Cases with separate tests."""
BUILT: Cases = {
    "built-shards": ("moe", {"shard": 2, "built": True}),
    "built-experts": ("moe", {"shard": 2, "experts": 2, "built": True}),
    "built-stages": ("moe", {"pipeline": 2, "built": True}),
}
"""Ways to divide a model that is built and not trained."""

GRID = [(model, way) for model in ("additive", "full", "block", "mgr", "mhc", "exoformer") for way in WAYS]
NORMAL = [
    *(("additive", way) for way in ("ddp", "fsdp", "1f1b")),
    ("full", "ddp"),  # the deferred backward under DDP's hooks
    ("full", "1f1b"),
    ("full", "interleaved"),
    ("block", "1f1b"),
    ("block", "interleaved"),
    ("mgr", "fsdp"),  # a state that is bound to the process
    ("mgr", "interleaved"),  # stage boundaries inside the fill phase and after it
    ("exoformer", "interleaved"),
]
"""The part of the grid in `make test`: one pair per kind of fault. `make nightly` runs the rest."""
NIGHTLY = [pair for pair in GRID if pair not in NORMAL]


def gridded(pairs: list[tuple[str, str]]) -> Cases:
    return {f"{model}-{way}": (model, WAYS[way]) for model, way in pairs}


REGULAR, NIGHTLY_CASES = gridded(NORMAL) | EXTRA, gridded(NIGHTLY) | EXTRA_NIGHTLY


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    ahead: Cases = {
        "differentiated-stages": ("full", COMPILED | {"backend": "aot_eager"}),
        "low-precision": ("additive", {"shard": 2, **FP8}),
        "low-precision-head": ("additive-32", {"shard": 2, **HEAD}),
        "low-precision-replicas": ("additive-32", {"data": 2, **HEAD}),
    }
    return Traces(2, tmp_path_factory.mktemp("traces"), REGULAR | SINGLE | BUILT, NIGHTLY_CASES | ahead)


@pytest.mark.parametrize("name", regular_and_nightly(REGULAR, NIGHTLY_CASES))
def test_two_ranks_train_like_one_process(traces: Traces, name: str) -> None:
    traces.assert_as_one(name)


@pytest.mark.parametrize("name", BUILT)
def test_rank_builds_its_share_plus_at_most_one_layer(traces: Traces, name: str) -> None:
    """The ranks together also have the weights of one process, bit for bit."""
    from tests.distributed.live import size

    torch.manual_seed(0)
    model, trace = residua.build(deep_config("moe").model), traces[name]
    for key, weight in model.named_parameters():
        assert torch.equal(trace[f"weight/{key}"], weight), key
    layer = size(model.sublayers[0]) + size(model.sublayers[1])
    assert trace["share/0"] + trace["share/1"] == pytest.approx(size(model), rel=0.01)
    for rank in (0, 1):
        assert trace[f"peak/{rank}"] <= trace[f"share/{rank}"] + 1.03 * layer < 0.7 * size(model)


ROUNDED = '{"precision": "bfloat16"}'


def test_gathered_working_copies_have_correct_gradients(traces: Traces) -> None:
    """In the first step. Later, weights that differ in the last bits may round differently in bfloat16."""
    first = {key: value for key, value in alone("mgr", ROUNDED).items() if key.startswith("0/")}
    assert_same_training({key: traces["rounded"][key] for key in first}, first)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["low-precision", "low-precision-head", "low-precision-replicas"])
def test_divided_fp8_step_has_correct_gradients(traces: Traces, name: str) -> None:
    """In the first step, as above."""
    model, recipe = ("additive", FP8) if name == "low-precision" else ("additive-32", HEAD)
    first = {key: v for key, v in alone(model, json.dumps(recipe)).items() if key.startswith("0/")}
    assert_same_training({key: traces[name][key] for key in first}, first)
    plain = alone(model, json.dumps(FP8 if recipe is HEAD else {}))
    assert any(not torch.equal(plain[key], value) for key, value in first.items())


def test_compiled_stages_train_like_one_process(traces: Traces) -> None:
    """Each of the two stages has a graph with gradients and one without."""
    assert_same_training(traces["compiled-stages"], alone("full", '{"layers": 2}'))
    assert (traces["compiled-stages"]["graphs"], traces["full-1f1b"]["graphs"]) == (4, 0)


@pytest.mark.nightly
def test_aot_differentiated_stages_train_like_one_process(traces: Traces) -> None:
    """In `make test`, another test covers layers."""
    assert_same_training(traces["differentiated-stages"], alone("full", '{"layers": 2}'))
    assert traces["differentiated-stages"]["graphs"] == 4


def test_stages_recompute_every_sublayer(traces: Traces) -> None:
    """In each micro-batch of two steps and a validation. Another test checks that they train as one process does."""
    passes = (STEPS + 1) * ACCUMULATE
    assert (traces["recomputed-stages"]["checkpointed"], traces["block-1f1b"]["checkpointed"]) == (8 * passes, 0)


def test_bfloat16_stages_have_the_gradients_of_one_process(traces: Traces) -> None:
    """Up to rounding, which accumulates over depth to 2 % of the smallest ones. Half as many bytes are sent."""
    first = {key: value for key, value in alone("full", ROUNDED).items() if key.startswith("0/")}
    for name, expected in first.items():
        error = (traces["rounded-stages"][name].double() - expected.double()).norm()
        assert error <= 0.03 * expected.double().norm(), name
    for way in ("bytes/forward", "bytes/backward"):
        assert traces["rounded-stages"][way] * 2 == traces["full-interleaved"][way]


def test_cached_block_traffic_matches_its_formula(traces: Traces) -> None:
    """Full, 8 sublayers, P = V = 2: N_p = 2 blocks per stage, and the embedding once to the other rank."""
    sent, naive = traces["full-interleaved"], traces["naive"]
    for way in ("forward", "backward"):
        kept = (2 * 1 / 2 + (2 - 1) * 2 * (2 - 1)) * 2
        assert sent[f"bytes/{way}"] == (kept + 1) * BLOCK
        assert sent[f"bytes/{way}"] <= (cached_blocks(2, 2, 2) + 1) * BLOCK
        assert naive[f"bytes/{way}"] == (naive_blocks(2, 2, 2) + 3) * BLOCK
        assert sent[f"bytes/{way}"] < naive[f"bytes/{way}"]


def test_run_reports_its_traffic_and_the_formulas_prediction(traces: Traces) -> None:
    """A block is 3 KiB per step. 7 are sent, 15 by sending at every hop, 12 and 10 (no embedding) by the formulas."""
    said = {name: bytes(traces[name]["notice"].tolist()).decode() for name in ("full-interleaved", "additive-1f1b")}
    assert said == {
        "full-interleaved": "pipeline sent 0.0205 MiB forward and 0.0205 MiB backward per step; sending every "
        "tensor at every hop would be 0.0439 MiB; formulas of arXiv 2603.15031, for blocks without the "
        "embedding: naive 0.0352 "
        "MiB, cached 0.0293 MiB.",
        "additive-1f1b": "pipeline sent 0.00293 MiB forward and 0.00293 MiB backward per step; sending every "
        "tensor at every hop would be 0.00293 MiB.",
    }


def test_cache_and_receive_buffers_are_freed(traces: Traces) -> None:
    """After two steps and a validation."""
    left = {name: int(traces[name]["kept"]) for name in REGULAR | SINGLE if "kept" in traces[name]}
    assert len(left) > 12
    assert left == dict.fromkeys(left, 0)


def test_recomputed_anchors_are_not_sent(traces: Traces) -> None:
    """ExoFormer sends its embedding once per rank instead of four anchors, and nothing if it is a source anyway."""
    assert traces["exoformer-interleaved"]["bytes/forward"] == (3 + 1) * BLOCK
    assert traces["exo-sent"]["bytes/forward"] == (3 + 4) * BLOCK
    assert traces["exo-in-sources"]["bytes/forward"] == traces["block-interleaved"]["bytes/forward"]


def test_pipeline_of_one_stage_per_rank_sends_every_block_onward(traces: Traces) -> None:
    assert traces["full-1f1b"]["bytes/forward"] == (cached_blocks(2, 1, 4) + 1) * BLOCK


def test_muon_gives_the_update_of_one_process(traces: Traces) -> None:
    """The first update starts from gradients that differ only in the last bits."""
    for way in ("ddp", "fsdp"):
        weights = {k: v for k, v in traces[f"additive-{way}"].items() if k.startswith("weight/sublayers")}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone("additive")[name], rtol=1e-4, atol=1e-5)


TURNS = [
    ("additive-ddp", 1), ("additive-fsdp", 1), ("ddp-in-turns", 8), ("fsdp-in-turns", 8), ("divided-experts", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "turns"), TURNS)
def test_each_matrix_is_orthogonalised_once(traces: Traces, name: str, turns: int) -> None:
    """By one of the ranks: all at once, or two at a time while the next two are being sent to their owners."""
    traces.assert_orthogonalised_once(name, turns)
