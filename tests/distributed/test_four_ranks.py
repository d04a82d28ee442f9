"""Four ranks: combinations of data, shard and pipeline."""

import pytest

from tests.distributed.traces import BLOCK, INTERLEAVED, Cases, Traces, regular_and_nightly

pytestmark = pytest.mark.slow

REGULAR: Cases = {
    "data-and-shard": ("mhc", {"data": 2, "shard": 2}),
    "data-and-shard-in-turns": ("moe", {"data": 2, "shard": 2, "experts": 2, "turn": 1}),
    "shard-and-interleaved": ("block", {"shard": 2, **INTERLEAVED}),
    "four-stages": ("full", {"pipeline": 4}),
    "experts-and-shard": ("moe", {"shard": 4, "experts": 2}),
    "experts-and-pipeline": ("biased", {"pipeline": 2, "shard": 2, "experts": 2}),
}
NIGHTLY_CASES: Cases = {
    "head-twice-on-a-rank": ("mhc", {"shard": 2, **INTERLEAVED, "cuts": [3, 8, 10], "pieces": 4}),
    "shard-and-shared-anchors": ("exoformer", {"shard": 2, "pipeline": 2}),  # whole matrices next to sharded ones
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


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(4, tmp_path_factory.mktemp("traces"), REGULAR, NIGHTLY_CASES)


@pytest.mark.parametrize("name", regular_and_nightly(REGULAR, NIGHTLY_CASES))
def test_four_ranks_train_like_one_process(traces: Traces, name: str) -> None:
    traces.assert_as_one(name)


def test_longer_pipeline_sends_every_block_to_every_later_rank(traces: Traces) -> None:
    """P = 4, V = 1, N_p = 2: P(P−1)/2 · N_p blocks, and the embedding three times."""
    assert traces["four-stages"]["bytes/forward"] == (4 * 3 / 2 * 2 + 3) * BLOCK


# experts are orthogonalised in separate turns, by the ranks that have them: 8 matrices by 2, and 16 others by 4
TURNS = [("data-and-shard", 1), ("data-and-shard-in-turns", 4 + 4), ("experts-and-shard", 2)]


@pytest.mark.parametrize(("name", "turns"), TURNS)
def test_each_matrix_is_orthogonalised_once(traces: Traces, name: str, turns: int) -> None:
    traces.assert_orthogonalised_once(name, turns)


def test_cache_and_receive_buffers_are_freed(traces: Traces) -> None:
    left = {name: int(traces[name]["kept"]) for name in REGULAR if "kept" in traces[name]}
    assert left == {name: 0 for name, (_, parallel) in REGULAR.items() if "pipeline" in parallel}
