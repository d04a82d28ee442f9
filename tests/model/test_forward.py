"""Whole sequences without gradients: the model rewritten for them computes what the model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import residua
from residua.generate.generator import prefill
from residua.model.decoder import Decoder
from residua.model.fold import fold_mixing
from residua.model.forward import Forward, SequenceAttention, SequenceFFN, for_sequences
from residua.model.topology.normed import NormedAdditive, NormedMultiGate, NormedReads, NormedTopology
from tests.generate.test_generate_cache import random_model
from tests.model.combinations import ROWS, name_of
from tests.model.pairwise import Row
from tests.model.small import small
from tests.nightly import covering

pytestmark = pytest.mark.slow

BLOCK = {"kind": "block_attnres"}
TOPOLOGIES: dict[str, tuple[dict[str, Any], type[NormedTopology]]] = {
    "additive": ({"kind": "additive"}, NormedAdditive),
    "blocks of one": (BLOCK | {"sublayers_per_block": 1}, NormedReads),
    "blocks of two": (BLOCK | {"sublayers_per_block": 2, "scale": 0.5}, NormedReads),
    "blocks of three": (BLOCK | {"sublayers_per_block": 3}, NormedReads),
    "one block": (BLOCK | {"sublayers_per_block": 16}, NormedReads),
    "full": ({"kind": "full_attnres"}, NormedReads),
    "full with a window": ({"kind": "full_attnres", "window": 3}, NormedReads),
    "two streams": ({"kind": "multi_gate", "streams": 2}, NormedMultiGate),
    "four streams": ({"kind": "multi_gate"}, NormedMultiGate),
    "independent gates": ({"kind": "multi_gate", "streams": 3, "gate": "independent"}, NormedMultiGate),
}


def model(**tables: Any) -> Decoder:
    built = residua.build(small(**tables)).eval()
    for name, parameter in built.named_parameters():
        if "topology" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return built.double()


@torch.no_grad()
def assert_same(built: Decoder, tolerance: float, **call: Any) -> Decoder:
    """Without a cache, and with one, whose contents must be the same, too."""
    rewritten, tokens = for_sequences(built), torch.randint(23, (2, 7))
    torch.testing.assert_close(rewritten.hidden(tokens, **call), built.hidden(tokens, **call), rtol=0, atol=tolerance)
    caches = [built.new_cache(2, 9) for _ in range(2)]
    counts = torch.tensor([7, 4])
    ours, exact = (m.hidden(tokens, cache=c, counts=counts) for m, c in zip((rewritten, built), caches, strict=True))
    torch.testing.assert_close(ours[0], exact[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(ours[1, :4], exact[1, :4], rtol=0, atol=tolerance)
    for a, b in zip(*(cache.tensors() for cache in caches), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)
    assert caches[0].lengths.tolist() == [7, 4]
    assert caches[0].reach == caches[1].reach
    return rewritten


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_junctions_with_their_norms_equal_direct_ones(name: str) -> None:
    topology, kind = TOPOLOGIES[name]
    built = model(topology=topology, layers=8)
    # queries are prepared in float32, which is where the difference comes from
    assert isinstance(assert_same(built, 1e-5).topology, kind)


@pytest.mark.parametrize(
    "attention",
    [
        {"heads": 2, "gate": "elementwise"},
        {"heads": 4, "kv_heads": 2, "gate": "headwise"},
        {"heads": 2, "qk_norm": "none", "sink": "learned"},
        {"heads": 2, "bias": "all", "window": 3},
    ],
)
def test_heads_normed_and_rotated_in_one_go_attend_as_others_do(attention: dict[str, Any]) -> None:
    rewritten = assert_same(model(attention={"kind": "softmax"} | attention), 1e-12)
    assert isinstance(rewritten.sublayers[0].body, SequenceAttention)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("folded", [False, True])
def test_values_are_mixed_with_those_of_the_first_layer_in_the_same_go(granularity: str, folded: bool) -> None:
    attention = {"kind": "softmax", "heads": 4, "kv_heads": 2}
    built = model(attention=attention, anchors={"kind": "resformer", "granularity": granularity}, layers=3)
    for name, parameter in built.named_parameters():
        if "scale" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    if folded:
        assert fold_mixing(built) == 2
    rewritten = assert_same(built, 1e-12)
    assert all(isinstance(sublayer.body, SequenceAttention) for sublayer in rewritten.sublayers[::2])


@pytest.mark.parametrize("kind", ["swiglu", "glu", "gelu"])
def test_a_feed_forward_whose_activation_is_one_kernel_is_the_same_map(kind: str) -> None:
    rewritten = assert_same(model(ffn={"kind": kind, "hidden": 24}), 1e-12)
    assert isinstance(rewritten.sublayers[1].body, SequenceFFN)


@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
def test_every_combination_of_components_is_the_same_with_what_can_be_rewritten(row: Row) -> None:
    assert_same(random_model(row), 1e-5)


@pytest.mark.parametrize(
    "tables",
    [
        {"placement": "both"},
        {"topology": BLOCK | {"sublayers_per_block": 2, "activation": "sigmoid"}},
        {"attention": {"kind": "softmax", "heads": 2, "qk_norm": "rms_all"}},
    ],
)
def test_what_has_no_such_form_stays_as_it_is(tables: dict[str, Any]) -> None:
    assert_same(model(**tables), 1e-12)


def test_documents_stay_apart() -> None:
    built, tokens = model(), torch.randint(23, (2, 7))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        ours, exact = (m.hidden(tokens, documents) for m in (for_sequences(built), built))
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


def test_a_model_that_someone_looks_into_keeps_the_modules_they_look_at() -> None:
    built, seen = model(), []
    built.sublayers[1].body.register_forward_hook(lambda *_: seen.append("body"))
    built.sublayers[2].register_forward_hook(lambda *_: seen.append("sublayer"))
    with torch.no_grad():
        rewritten = for_sequences(built)
        rewritten.hidden(torch.randint(23, (1, 3)))
    assert seen == ["body", "sublayer"]
    assert rewritten.topology is built.topology
    assert isinstance(rewritten.sublayers[0].body, SequenceAttention)


def test_junctions_may_stay_as_they_are() -> None:
    built, tokens = model(topology={"kind": "full_attnres"}), torch.randint(23, (2, 7))
    with torch.no_grad():
        rewritten = for_sequences(built, junctions=False)
        torch.testing.assert_close(rewritten.hidden(tokens), built.hidden(tokens), rtol=0, atol=1e-12)
    assert rewritten.topology is built.topology
    assert isinstance(rewritten.sublayers[0].body, SequenceAttention)


def test_on_a_cpu_the_model_runs_as_it_is() -> None:
    built, tokens = model().float(), torch.randint(23, (2, 7))
    caches = [built.new_cache(2, 9) for _ in range(2)]
    forward = Forward(built)
    with torch.no_grad():
        assert torch.equal(forward.hidden(tokens), built.hidden(tokens))
        ours, exact = (prefill(m, c, tokens.tolist(), 4) for m, c in zip((forward, built), caches, strict=True))
    assert torch.equal(ours, exact)


def test_prompts_padded_to_a_multiple_fill_the_cache_with_their_own_tokens() -> None:
    built = model()
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    caches = [built.new_cache(2, capacity) for capacity in (9, 9, 6)]
    with torch.no_grad():
        exact = prefill(built, caches[0], prompts)
        for cache in caches[1:]:
            torch.testing.assert_close(prefill(built, cache, prompts, multiple=4), exact, rtol=0, atol=1e-12)
            assert cache.lengths.tolist() == [5, 2]
    assert [cache.reach for cache in caches] == [5, 8, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_replayed_batch_equals_the_launched_one(name: str) -> None:
    built = model(topology=TOPOLOGIES[name][0], layers=8).to("cuda", torch.float32)
    forward, tokens = Forward(built), torch.randint(23, (5, 2, 7), device="cuda")
    cache, fast = built.new_cache(2, 9), for_sequences(built)
    for batch in tokens:
        with torch.inference_mode():
            alone, own = fast.hidden(batch), built.new_cache(2, 9)
            assert torch.equal(forward.hidden(batch), alone)
            cache.clear()
            assert torch.equal(forward.hidden(batch, cache=cache), fast.hidden(batch, cache=own))
        assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), own.tensors(), strict=True))
        assert cache.reach == own.reach == 7
        assert cache.lengths.tolist() == [7, 7]
