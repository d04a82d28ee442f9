"""Four ranks: combinations of data, shard and pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.cases import ACCUMULATE, LENGTH, MICRO_BATCH, MIXTURES, STEPS
from tests.distributed.compare import TOLERANCE, WEIGHT_TOLERANCE, assert_same_training
from tests.distributed.launch import launch

pytestmark = pytest.mark.slow

INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "data-and-shard": ("mhc", {"data": 2, "shard": 2}),
    "data-and-shard-in-turns": ("moe", {"data": 2, "shard": 2, "experts": 2, "turn": 1}),
    "shard-and-interleaved": ("block", {"shard": 2, **INTERLEAVED}),
    "four-stages": ("full", {"pipeline": 4}),
    "experts-and-shard": ("moe", {"shard": 4, "experts": 2}),
    "experts-and-pipeline": ("biased", {"pipeline": 2, "shard": 2, "experts": 2}),
    "head-twice-on-a-rank": ("mhc", {"shard": 2, **INTERLEAVED, "cuts": [3, 8, 10], "pieces": 4}),
}


NIGHTLY: dict[str, tuple[str, dict[str, Any]]] = {
    "shard-and-shared-anchors": ("exoformer", {"shard": 2, "pipeline": 2}),  # whole matrices beside sharded ones
    "data-and-pipeline": ("exoformer", {"data": 2, "pipeline": 2}),
    "sharded-heads": ("mhc", {"shard": 2, "pipeline": 2, "cuts": [10], "pieces": 4}),
    "head-in-three": ("additive", {"pipeline": 4, "cuts": [5, 9, 11], "pieces": 4}),
    "one-expert-each": ("moe", {"shard": 4, "experts": 4}),
    "biased-experts": ("biased", {"shard": 4, "experts": 2}),
    "experts-in-turns": ("moe", {"shard": 4, "experts": 2, "turn": 1}),
    "recomputed-experts": ("moe", {"shard": 4, "experts": 2, "recompute": "sublayers"}),
    "copied-biased-experts": ("biased", {"data": 2, "shard": 2, "experts": 2}),
    "experts-and-interleaved": ("moe", {"shard": 2, "experts": 2, **INTERLEAVED}),
    "experts-and-gpipe": ("moe", {"shard": 2, "experts": 2, "pipeline": 2, "schedule": "gpipe"}),
    "copied-stages-of-experts": ("biased", {"data": 2, "pipeline": 2}),
    "four-stages-of-experts": ("moe", {"pipeline": 4}),
    "experts-cut-off-their-attention": ("biased", {"shard": 2, "experts": 2, "pipeline": 2, "cuts": [3]}),
    "recomputed-stages-of-experts": ("biased", {"data": 2, "pipeline": 2, "recompute": "sublayers"}),
    "compiled-experts": (
        "moe",
        {"data": 2, "shard": 2, "experts": 2, "layers": 2, "compile": "on", "backend": "eager"},
    ),
}


def train(out: Path, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Tensor]]:
    launch(4, "tests.distributed.worker", out, [(name, model, parallel) for name, (model, parallel) in cases.items()])
    return {name: load_file(out / f"{name}.safetensors") for name in cases}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return train(tmp_path_factory.mktemp("traces"), CASES)


@pytest.fixture(scope="module")
def nightly_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return train(tmp_path_factory.mktemp("traces"), NIGHTLY)


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_train_as_one(traces: Any, name: str) -> None:
    from tests.distributed.worker import single

    model, _ = CASES[name]
    assert_same_training(traces[name], single(model), TOLERANCE if model in MIXTURES else WEIGHT_TOLERANCE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_four_ranks_train_as_one_in_other_ways(nightly_traces: Any, name: str) -> None:
    from tests.distributed.worker import single

    model, parallel = NIGHTLY[name]
    recipe = {key: parallel[key] for key in ("recompute", "layers") if key in parallel}
    weights = TOLERANCE if model in MIXTURES else WEIGHT_TOLERANCE
    assert_same_training(nightly_traces[name], single(model, **recipe), weights)


def test_a_longer_pipeline_sends_every_block_to_every_later_rank(traces: Any) -> None:
    """P = 4, V = 1, N_p = 2: P(P−1)/2 · N_p blocks, and the embedding three times."""
    block = MICRO_BATCH * LENGTH * 16 * 4 * ACCUMULATE
    assert traces["four-stages"]["bytes/forward"] == (4 * 3 / 2 * 2 + 3) * block


# experts are orthogonalised in turns of their own, by the ranks that have them: 8 matrices by 2, and 16 others by 4
TURNS = [("data-and-shard", 1), ("data-and-shard-in-turns", 4 + 4), ("experts-and-shard", 2)]


@pytest.mark.parametrize(("name", "turns"), TURNS)
def test_each_matrix_is_orthogonalised_once(traces: Any, name: str, turns: int) -> None:
    from tests.distributed.worker import orthogonalised, single

    with orthogonalised() as matrices:
        single(CASES[name][0])
    assert (traces[name]["matrices"], traces[name]["turns"]) == (sum(matrices), turns * STEPS)


def test_cache_and_receive_buffers_are_freed(traces: Any) -> None:
    left = {name: int(trace["kept"]) for name, trace in traces.items() if "kept" in trace}
    assert left == {name: 0 for name, (_, parallel) in CASES.items() if "pipeline" in parallel}
