"""Whole layers in one launch give the logits of the model.

Here each phase is a launch: the interpreter runs programs in turn, and would wait forever at the first
barrier.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from residua import ops
from residua.generate.engine import launched_step
from residua.generate.generator import Request, prefill
from residua.generate.whole_step import build_layers, whole_step
from residua.model.attention import fold_mixing
from residua.model.cache import Cache
from residua.model.decoder import Decoder
from residua.ops import inference
from residua.ops.whole_layers import launch
from residua.ops.whole_layers.launch import Layers
from residua.storage.model_folder import place
from tests.generate.test_inference import (
    BLOCK,
    GENERATING,
    SOFTMAX,
    TOPOLOGIES,
    WIDE,
    assert_generates,
    decoded,
    model,
    value_residuals,
)
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow
pytest.importorskip("triton")


def filled(built: Decoder, tokens: Tensor) -> Cache:
    """A static cache of all but the last two tokens."""
    cache = built.new_cache(len(tokens), max(8, tokens.shape[1]))
    prefill(built, cache, tokens[:, :-2].tolist())
    cache.static = True
    return cache


@torch.no_grad()
def assert_decodes(built: Decoder, tokens: Tensor) -> None:
    """The last two tokens, each in one step."""
    cache = filled(built, tokens)
    with ops.backend("triton"):
        step = whole_step(built, cache)
        logits = [step(tokens[:, -2]), step(tokens[:, -1])]
    assert cache.lengths.tolist() == [tokens.shape[1]] * len(tokens)
    torch.testing.assert_close(torch.stack(logits, 1), built(tokens)[:, -2:], rtol=0, atol=2e-5)


def check(built: Decoder, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SPLITS", 2)
    assert_decodes(built, torch.randint(23, (rows, 6)))


NIGHTLY = ["blocks of three", "a last block cut short", "one block", "four streams", "independent gates"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("additive", 1),
        ("blocks of two", 2),
        ("two streams", 2),
        *(pytest.param(name, 3, marks=pytest.mark.nightly) for name in NIGHTLY),
    ],
)
def test_phases_decode_like_the_model(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(model(TOPOLOGIES[name][0], layers=layers), 2, monkeypatch)


GROUPED = SOFTMAX | {"heads": 4, "kv_heads": 2, "head_dim": 8}
MIXED = list(product(["elementwise", "headwise", "scalar"], [False, True]))


@pytest.mark.parametrize("case", only_nightly(MIXED, but=[("elementwise", False), ("scalar", True)]))
def test_phases_mix_first_layer_values_like_the_model(case: tuple[str, bool], monkeypatch) -> None:
    """Grouped heads, of whose group one program writes the anchor; the last layer mixes after one that did."""
    granularity, folded = case
    topology = TOPOLOGIES["two streams" if folded else "additive"][0]
    built = value_residuals(topology, granularity, layers=3, attention=GROUPED)
    if folded:
        assert fold_mixing(built) == 2
    check(built, 2, monkeypatch)


GATED, BY_HEAD = ({"attention": GROUPED | {"gate": gate}} for gate in ("elementwise", "headwise"))
EXO, DYNAMIC = {"kind": "exoformer"}, {"kind": "exoformer", "mixing": {"kind": "dynamic", "hidden": 6}}
WITH_GATES: dict[str, dict[str, Any]] = {
    "gate": GATED,
    "headwise gate": BY_HEAD,
    "gate and value residuals": GATED | {"anchors": {"kind": "resformer"}},
    "static": GATED | {"anchors": EXO},
    "static, folded": GATED | {"anchors": EXO},
    "two pathways": BY_HEAD | {"anchors": EXO | {"pathways": ["v", "q"], "norm": "qk", "granularity": "headwise"}},
    "dynamic": GATED | {"anchors": DYNAMIC},
    "dynamic, two pathways": GATED | {"anchors": DYNAMIC | {"pathways": ["g", "k"], "norm": "none"}},
    "dynamic, no gate": {"attention": GROUPED, "anchors": DYNAMIC | {"pathways": ["k", "v", "q"]}},
}


def gated_model(case: str, topology: str, layers: int, **tables: Any) -> Decoder:
    """Neither λ nor the map of γ has its initial value."""
    built = model(TOPOLOGIES[topology][0], layers=layers, **(WITH_GATES[case] | tables))
    for name, parameter in built.named_parameters():
        if "scale" in name or "gamma" in name:
            nn.init.normal_(parameter, mean=0.0 if "weight" in name else 0.5, std=0.3)
    if case.endswith("folded"):
        fold_mixing(built)
    return built


REGULAR = ["two pathways", "dynamic"]


@pytest.mark.parametrize("case", only_nightly(WITH_GATES, but=REGULAR))
def test_phases_gate_and_mix_heads_like_the_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(gated_model(case, "two streams" if "two" in case else "additive", 2), 2, monkeypatch)


@pytest.mark.parametrize("layers", only_nightly([4, 17], but=[4]))
def test_phases_accept_more_sources_than_single_junctions(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_division", lambda x: (1, 4))
    monkeypatch.setattr(inference, "MOST_SOURCES", 2 * layers - 1)
    tables = {"width": 8, "attention": SOFTMAX | {"heads": 1}, "ffn": {"kind": "relu2", "hidden": 8}}
    built = model({"kind": "full_attnres"}, layers=layers, **tables)
    monkeypatch.delattr(inference, "read_sources")
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=2e-5)
    check(built, 1, monkeypatch)


@pytest.mark.parametrize(
    "tables",
    [
        {"attention": SOFTMAX | {"heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": "none"},
         "ffn": {"kind": "relu2", "hidden": 40}},
        {"attention": SOFTMAX | {"heads": 3}, "width": 24, "embed_scale": 2.0, "ffn": {"kind": "gelu", "hidden": 40}},
    ],
)  # fmt: skip
def test_phases_decode_other_layers_like_the_model(tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program has several tiles of rows; a row of 24 or 40 channels is two blocks."""
    check(model({"kind": "additive"}, layers=1, **tables), 1, monkeypatch)


def test_long_caches_are_attended_to_in_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty tokens are three shares of sixteen slots, of which a program reads sixteen at a time."""
    monkeypatch.setattr(launch, "SPLITS", 4)
    monkeypatch.setattr(launch, "SLOTS_HELD", 16)
    assert_decodes(model({"kind": "additive"}, layers=1, context=64), torch.randint(23, (1, 42)))


@pytest.mark.parametrize(
    "tables",
    [
        {"norm": {"kind": "gatednorm", "rank": 4}},
        {"norm": {"kind": "layernorm"}},
        {"norm": {"kind": "unit_rmsnorm"}},
        {"learned_positions": 64},
        {"topology": {"kind": "parallel"}},
        {"topology": {"kind": "full_attnres", "window": 2}},
        {"topology": {"kind": "multi_gate", "streams": 5}},
        {"attention": SOFTMAX | {"sink": "learned"}},
        {"attention": SOFTMAX | {"bias": "all"}},
        {"attention": SOFTMAX | {"window": 2}},
        {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 16}},
        {"attention": {"kind": "mla", "heads": 2, "head_dim": 8, "shared_dim": 4, "rank": 12}},
        {"ffn": {"kind": "moe", "hidden": 24, "experts": 4, "top_k": 2}},
        {"anchors": {"kind": "nuresformer", "pathways": ["v"]}},  # values are normed before they are mixed
        {"anchors": {"kind": "nuresformer", "pathways": ["q", "v"], "norm": "none"}},
        {"anchors": {"kind": "gated_value"}},
        {"ffn": {"kind": "geglu", "hidden": 24}},
        {"ffn": {"kind": "gelu_tanh", "hidden": 24}},
        {"ffn": {"kind": "relu2", "hidden": 20}},
    ],
)
def test_unsupported_models_take_the_layer_path(tables: dict[str, Any]) -> None:
    built = model(tables.pop("topology", {"kind": "additive"}), **tables)
    with ops.backend("triton"):
        assert build_layers(built, filled_with_nothing(built, 2)) is None


def test_quantized_projections_take_the_layer_path() -> None:
    built = gated_model("dynamic", "additive", 1)
    attention, ffn = (sublayer.body for sublayer in built.sublayers)
    places = [(attention, "out"), (ffn, "out"), (attention.mix.gamma, "down"), (attention.mix.gamma, "up")]
    with ops.backend("triton"):
        for module, name in places:
            kept = getattr(module, name)
            setattr(module, name, nn.Linear(1, 1))
            assert build_layers(built, filled_with_nothing(built, 1)) is None
            setattr(module, name, kept)
        assert build_layers(built, filled_with_nothing(built, 1)) is not None


def filled_with_nothing(built: Decoder, rows: int) -> Cache:
    cache = built.new_cache(rows, 8)
    cache.static = True
    return cache


def test_many_rows_and_unsupported_sizes_take_the_layer_path(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model({"kind": "additive"})
    with ops.backend("triton"):
        assert build_layers(built, filled_with_nothing(built, 3)) is None  # there are two programs with weights
        assert build_layers(built, filled_with_nothing(built, 2)) is not None
        monkeypatch.setattr(launch, "MOST_HELD", 1)
        assert build_layers(built, filled_with_nothing(built, 2)) is None
        monkeypatch.undo()
        assert build_layers(built.double(), filled_with_nothing(built, 2)) is None


def test_only_graphs_of_unhooked_models_use_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model(BLOCK | {"sublayers_per_block": 2})
    cache = filled_with_nothing(built, 1)
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    with ops.backend("triton"):
        assert "whole_step" in launched_step(built, cache, "graph").__qualname__
        assert "whole_step" not in launched_step(built, cache, "compile").__qualname__
        built.embed.register_forward_hook(lambda *_: None)
        assert "whole_step" not in launched_step(built, cache, "graph").__qualname__


PROMPTS = ["hello there", "a"]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "layers"), [*((name, 3) for name in TOPOLOGIES), ("full", 36), ("full", 70)])
def test_one_launch_generates_like_plain_steps(name: str, layers: int) -> None:
    assert_generates(model(TOPOLOGIES[name][0], layers=layers, **WIDE), "graph", PROMPTS, Request(24))


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("name", ["additive", "blocks of two", "two streams"])
def test_one_launch_mixes_values_like_plain_steps(name: str, granularity: str) -> None:
    built = value_residuals(TOPOLOGIES[name][0], granularity, layers=4, **WIDE)
    assert_generates(built, "graph", PROMPTS, Request(24))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "case"),
    [*(("additive", case) for case in WITH_GATES), ("blocks of two", "dynamic"), ("two streams", "dynamic")],
)
def test_one_launch_gates_and_mixes_heads_like_plain_steps(name: str, case: str) -> None:
    built = gated_model(case, name, 4, **GENERATING, width=64)
    assert build_layers(place(built, torch.device("cuda"), "float32"), filled_with_nothing(built, 2)) is not None
    assert_generates(built, "graph", PROMPTS, Request(24))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "layers", "case"),
    [
        *((name, 3, None) for name in ("additive", "blocks of two", "full", "four streams")),
        ("full", 36, None),
        ("additive", 3, "dynamic"),
        ("four streams", 3, "dynamic"),
    ],
)
@torch.no_grad()
def test_barriers_and_separate_launches_are_bit_identical(name: str, layers: int, case: str | None) -> None:
    topology, tables = TOPOLOGIES[name][0], {"layers": layers} | WIDE
    built = model(topology, **tables) if case is None else gated_model(case, name, layers, **GENERATING, width=64)
    built = place(built, torch.device("cuda"))
    tokens, results = torch.randint(257, (2, 12), device="cuda"), []
    for run in (Layers.__call__, Layers.in_phases, Layers.__call__):
        cache = built.new_cache(2, 48)
        cache.static = True
        whole = build_layers(built, cache)
        whole.anchor.fill_(0.5)
        for column in tokens.T:
            whole.y.copy_(built.embed(column))
            normed = run(whole, cache.lengths).clone()
            cache.advance(1)
        results.append((normed, *(kept.clone() for kept in cache.tensors())))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))
