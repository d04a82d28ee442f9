"""A model rewritten for inference matches the model: prompts, and decoding one token per row."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.data.tokenizer import Tokenizer
from residua.generate.generator import Generator, Request, prefill
from residua.generate.sample import Sampling
from residua.model.attention import SoftmaxAttention, fold_mixing
from residua.model.decoder import Decoder
from residua.model.inference import Forward, InferenceAttention, InferenceDecoder, InferenceFFN
from residua.model.topology.inference import AdditiveInference, InferenceTopology, ReadInference, StreamInference
from residua.ops import inference
from residua.ops._runtime.backend import Operator
from residua.storage.model_folder import place
from tests.generate.test_generate_cache import random_model
from tests.model.combinations import ROWS, name_of
from tests.model.pairwise import Row
from tests.model.small import small
from tests.nightly import covering, only_nightly

pytestmark = pytest.mark.slow

BLOCK = {"kind": "block_attnres"}
TOPOLOGIES: dict[str, tuple[dict[str, Any], type[InferenceTopology]]] = {
    "additive": ({"kind": "additive"}, AdditiveInference),
    "blocks of one": (BLOCK | {"sublayers_per_block": 1}, ReadInference),
    "blocks of two": (BLOCK | {"sublayers_per_block": 2, "scale": 0.5}, ReadInference),
    "blocks of three": (BLOCK | {"sublayers_per_block": 3}, ReadInference),
    "a last block cut short": (BLOCK | {"sublayers_per_block": 4}, ReadInference),
    "one block": (BLOCK | {"sublayers_per_block": 6}, ReadInference),
    "full": ({"kind": "full_attnres"}, ReadInference),
    "two streams": ({"kind": "multi_gate", "streams": 2}, StreamInference),
    "four streams": ({"kind": "multi_gate"}, StreamInference),
    "independent gates": ({"kind": "multi_gate", "streams": 3, "gate": "independent"}, StreamInference),
}
WINDOW = {"kind": "full_attnres", "window": 3}
SOFTMAX = {"kind": "softmax", "heads": 2}


def model(topology: dict[str, Any] | None = None, **tables: Any) -> Decoder:
    built = residua.build(small(topology=topology or {"kind": "additive"}, **tables)).eval()
    for name, parameter in built.named_parameters():
        if "topology" in name or "norm" in name:
            nn.init.normal_(parameter, mean=0.5, std=0.5)
    return built


def value_residuals(topology: dict[str, Any] | None = None, granularity: str = "headwise", **tables: Any) -> Decoder:
    built = model(topology, anchors={"kind": "resformer", "granularity": granularity}, **tables)
    for name, parameter in built.named_parameters():
        if "scale" in name:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return built


@torch.no_grad()
def decoded(built: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits after the last two tokens, by the rewritten model one by one and by the model in one pass."""
    cache = built.new_cache(len(tokens), 8)
    prefill(built, cache, tokens[:, :-2].tolist())
    rewritten = InferenceDecoder(built, 8)
    steps = [rewritten(tokens[:, t : t + 1], cache=cache) for t in (-2, tokens.shape[1] - 1)]
    return torch.cat(steps, 1), built(tokens)[:, -2:]


@torch.no_grad()
def assert_same(built: Decoder, tolerance: float) -> InferenceDecoder:
    """Prompts without and with a cache, whose contents must be equal too; tokens after them, together and
    alone."""

    def same(ours: Tensor, exact: Tensor) -> None:
        torch.testing.assert_close(ours, exact, rtol=0, atol=tolerance)

    rewritten, tokens = InferenceDecoder(built, 16), torch.randint(23, (2, 7))
    same(rewritten.hidden(tokens), built.hidden(tokens))
    caches, counts = [built.new_cache(2, 16) for _ in range(2)], torch.tensor([7, 4])
    ours, exact = (m.hidden(tokens, cache=c, counts=counts) for m, c in zip((rewritten, built), caches, strict=True))
    same(ours[0], exact[0])
    same(ours[1, :4], exact[1, :4])
    for length in (0, 3, 1, 1):
        if length:
            same(*(m.hidden(tokens[:, :length], cache=c) for m, c in zip((rewritten, built), caches, strict=True)))
        for a, b in zip(*(cache.tensors() for cache in caches), strict=True):
            same(a, b)
    assert caches[0].lengths.tolist() == [12, 9]
    assert caches[0].reach == caches[1].reach
    return rewritten


@pytest.mark.parametrize("name", [*TOPOLOGIES, "full with a window"])
def test_junctions_fused_with_norms_match_the_model(name: str) -> None:
    topology, kind = TOPOLOGIES.get(name, (WINDOW, ReadInference))
    # queries are prepared in float32, which is where the difference comes from
    for layers, tolerance in ((3, 1e-6), (8, 1e-5)):
        assert isinstance(assert_same(model(topology, layers=layers).double(), tolerance).topology, kind)


@pytest.mark.parametrize(
    "attention",
    [
        {"heads": 2, "gate": "elementwise"},
        {"heads": 4, "kv_heads": 2, "gate": "headwise"},
        {"heads": 2, "qk_norm": "none", "sink": "learned"},
        {"heads": 2, "bias": "all", "window": 3},
        {"heads": 2, "softcap": 0.7},
    ],
)
def test_heads_written_directly_to_the_cache_match_the_model(attention: dict[str, Any]) -> None:
    rewritten = assert_same(model(attention={"kind": "softmax"} | attention).double(), 1e-12)
    assert isinstance(rewritten.sublayers[0].body, InferenceAttention)
    assert rewritten.sublayers[0].body.decodes == (not attention.keys() & {"window", "softcap"})


def test_attention_with_growing_queries_is_not_rewritten() -> None:
    growing = {"kind": "softmax", "heads": 2, "query_growth": {"beta": 0.7, "original_context": 2}}
    assert isinstance(assert_same(model(attention=growing).double(), 1e-12).sublayers[0].body, SoftmaxAttention)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("folded", [False, True])
def test_values_mixed_while_entering_the_cache_match_the_model(granularity: str, folded: bool) -> None:
    attention = {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "headwise"}
    built = value_residuals(granularity=granularity, attention=attention, layers=3).double()
    if folded:
        assert fold_mixing(built) == 2
    rewritten = assert_same(built, 1e-12)
    assert all(isinstance(sublayer.body, InferenceAttention) for sublayer in rewritten.sublayers[::2])


@pytest.mark.parametrize("kind", ["swiglu", "glu", "relu2", "gelu"])
def test_feed_forward_with_fused_activation_matches_the_model(kind: str) -> None:
    rewritten = assert_same(model(ffn={"kind": kind, "hidden": 24}).double(), 1e-12)
    assert isinstance(rewritten.sublayers[1].body, InferenceFFN)


@pytest.mark.parametrize("row", covering(ROWS), ids=name_of)
def test_combinations_of_components_match_the_model(row: Row) -> None:
    assert_same(random_model(row), 1e-5)


@pytest.mark.parametrize(
    "tables",
    [
        {"placement": "both"},
        {"norm": {"kind": "gatednorm", "rank": 4}},
        {"topology": {"kind": "hyper"}},
        {"topology": BLOCK | {"sublayers_per_block": 2, "activation": "sigmoid"}},
        {"anchors": {"kind": "nuresformer", "pathways": ["k", "v"]}},
        {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}},
        {"attention": {"kind": "softmax", "heads": 2, "qk_norm": "rms_all"}},
        {"attention": {"kind": "softmax", "heads": 2, "qk_norm": "rms_qkv"}},
        {"attention": {"kind": "softmax", "heads": 2, "values": "keys"}},
        {"topology": {"kind": "layer_factor"}},
    ],
)
def test_parts_without_an_inference_form_are_kept(tables: dict[str, Any]) -> None:
    built = residua.build(small(**tables)).double()
    rewritten = assert_same(built, 1e-12)
    kept = rewritten.topology is built.topology, rewritten.sublayers[-2].body is built.sublayers[-2].body
    assert any(kept) or "placement" in tables
    assert kept[0] == (rewritten.norm is built.norm)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("additive", 3),
        ("blocks of two", 3),
        ("four streams", 3),
        ("full", 3),
        pytest.param("full", 17, marks=pytest.mark.nightly),
    ],
)
def test_interpreted_kernels_decode_like_the_model(name: str, layers: int, monkeypatch) -> None:
    operators = [vars(inference)[name] for name in inference.__all__]

    def fused_where_decoding(self: Any, *args: Any, **settings: Any) -> Any:
        return (self.fused if self in operators else self.reference)(*args, **settings)

    monkeypatch.setattr(Operator, "__call__", fused_where_decoding)
    built = model(TOPOLOGIES[name][0], layers=layers)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=2e-5)


LAUNCHES = {
    "additive": {"add_norm": 6},
    "blocks of two": {"read_sources": 4, "read_partial": 3},
    "full": {"read_sources": 7},
    "four streams": {"read_sources": 3, "gate_norm": 3},
}


@pytest.mark.parametrize("name", LAUNCHES)
@torch.no_grad()
def test_junction_of_a_decoding_step_is_one_launch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built, calls = model(TOPOLOGIES[name][0], layers=3), dict.fromkeys(inference.__all__, 0)
    cache = built.new_cache(2, 8)
    prefill(built, cache, [[1, 2], [3]])
    run = Operator.__call__

    def counted(self: Any, *args: Any, **settings: Any) -> Any:
        if self is vars(inference).get(self.__name__):
            calls[self.__name__] += 1
        return run(self, *args, **settings)

    monkeypatch.setattr(Operator, "__call__", counted)
    InferenceDecoder(built, 8).hidden(torch.tensor([[4], [5]]), cache=cache)
    heads = {"enter_cache": 3, "decode_attention": 3, "activate": 3}
    assert {operator: count for operator, count in calls.items() if count} == LAUNCHES[name] | heads


def test_rewritten_model_keeps_documents_separate() -> None:
    built, tokens = model().double(), torch.randint(23, (2, 7))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        ours, exact = (m.hidden(tokens, documents) for m in (InferenceDecoder(built), built))
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


def test_hooked_modules_are_not_rewritten() -> None:
    built, seen = model(), []
    built.sublayers[1].body.register_forward_hook(lambda *_: seen.append("body"))
    built.sublayers[2].register_forward_hook(lambda *_: seen.append("sublayer"))
    with torch.no_grad():
        rewritten = InferenceDecoder(built)
        rewritten.hidden(torch.randint(23, (1, 3)))
    assert seen == ["body", "sublayer"]
    assert rewritten.topology is built.topology
    assert isinstance(rewritten.sublayers[0].body, InferenceAttention)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=2e-5)


def test_junctions_can_be_left_unrewritten() -> None:
    built, tokens = model({"kind": "full_attnres"}).double(), torch.randint(23, (2, 7))
    with torch.no_grad():
        rewritten = InferenceDecoder(built, junctions=False)
        torch.testing.assert_close(rewritten.hidden(tokens), built.hidden(tokens), rtol=0, atol=1e-12)
    assert rewritten.topology is built.topology
    assert isinstance(rewritten.sublayers[0].body, InferenceAttention)


def test_rewritten_model_shares_weights_and_keeps_original() -> None:
    built = model(BLOCK | {"sublayers_per_block": 2})
    names = set(built.state_dict())
    rewritten = InferenceDecoder(built, 8)
    assert rewritten.embed.weight is built.embed.weight
    assert rewritten.sublayers[0].body.attention is built.sublayers[0].body
    assert rewritten.sublayers[1].body.body is built.sublayers[1].body
    assert set(built.state_dict()) == names


def test_model_runs_unrewritten_on_a_cpu() -> None:
    built, tokens = model(), torch.randint(23, (2, 7))
    caches = [built.new_cache(2, 9) for _ in range(2)]
    forward = Forward(built)
    with torch.no_grad():
        assert torch.equal(forward.hidden(tokens), built.hidden(tokens))
        ours, exact = (prefill(m, c, tokens.tolist(), 4) for m, c in zip((forward, built), caches, strict=True))
    assert torch.equal(ours, exact)


def test_padded_prompts_fill_the_cache_without_padding() -> None:
    built = model().double()
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    caches = [built.new_cache(2, capacity) for capacity in (9, 9, 6)]
    with torch.no_grad():
        exact = prefill(built, caches[0], prompts)
        for cache in caches[1:]:
            torch.testing.assert_close(prefill(built, cache, prompts, multiple=4), exact, rtol=0, atol=1e-12)
            assert cache.lengths.tolist() == [5, 2]
    assert [cache.reach for cache in caches] == [5, 8, 6]


GENERATING = {"vocab_size": 257, "context": 48}


@pytest.mark.parametrize("name", only_nightly(["additive", "blocks of two", "four streams"], but=["four streams"]))
@pytest.mark.parametrize("anchors", only_nightly(["none", "resformer"], but=["resformer"]))
def test_decoding_step_is_traced_whole(name: str, anchors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="eager", **options))
    built = model(TOPOLOGIES[name][0], anchors={"kind": anchors}, **GENERATING)
    plain, traced = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", "compile"))
    assert traced(["abc", "d"], Request(4))[0] == plain(["abc", "d"], Request(4))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_replayed_batch_equals_launched_batch(name: str) -> None:
    built = model(TOPOLOGIES[name][0], layers=8).to("cuda", torch.float32)
    forward, tokens = Forward(built), torch.randint(23, (5, 2, 7), device="cuda")
    cache, fast = built.new_cache(2, 9), InferenceDecoder(built)
    for batch in tokens:
        with torch.inference_mode():
            alone, own = fast.hidden(batch), built.new_cache(2, 9)
            assert torch.equal(forward.hidden(batch), alone)
            cache.clear()
            assert torch.equal(forward.hidden(batch, cache=cache), fast.hidden(batch, cache=own))
        assert all(torch.equal(a, b) for a, b in zip(cache.tensors(), own.tensors(), strict=True))
        assert cache.reach == own.reach == 7
        assert cache.lengths.tolist() == [7, 7]


WIDE = GENERATING | {"width": 64, "attention": {"kind": "softmax", "heads": 4}}
"""Tables of models that generate on a GPU."""


def assert_generates(built: Decoder, engine: str, prompts: list[str], request: Request) -> None:
    """The text of plain steps; the captured step is reused for the next prompts."""
    torch.compiler.reset()  # one function is compiled for every case, and there is a limit to that
    built = place(built, torch.device("cuda"), "float32")
    plain, replayed = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", engine))
    for again in (prompts, prompts[::-1]):
        assert replayed(again, request)[0] == plain(again, request)[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "anchors"),
    [*((name, "none") for name in TOPOLOGIES), ("additive", "resformer"), ("two streams", "resformer")],
)
@pytest.mark.parametrize("engine", ["graph", "compile"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=20, seed=1)], ids=["greedy", "drawn"])
def test_replayed_graph_generates_like_plain_steps(name: str, anchors: str, engine: str, sampling: Sampling) -> None:
    built = model(TOPOLOGIES[name][0], anchors={"kind": anchors}, **WIDE)
    assert_generates(built, engine, ["hello there", "a", "some more text"], Request(24, sampling))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("engine", ["graph", "compile"])
@pytest.mark.parametrize("gate", ["competitive", "independent"])
def test_graph_of_wide_streams_generates_like_plain_steps(gate: str, engine: str, rows: int) -> None:
    built = model({"kind": "multi_gate", "gate": gate}, **WIDE | {"width": 512})
    assert_generates(built, engine, [chr(97 + row) * (1 + row % 5) for row in range(rows)], Request(24))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("engine", "tables"),
    [
        ("graph", {"topology": WINDOW}),
        ("compile", {"topology": WINDOW}),
        ("graph", {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 16}}),
        ("graph", {"ffn": {"kind": "moe", "hidden": 32, "experts": 8, "top_k": 2}}),
        ("compile", {"ffn": {"kind": "moe", "hidden": 32, "experts": 8, "top_k": 2}}),
    ],
    ids=["window graph", "window compile", "recurrent graph", "mixture graph", "mixture compile"],
)
def test_graph_of_other_mixers_generates_like_plain_steps(engine: str, tables: dict[str, Any]) -> None:
    """A recurrent mixer starts where the prompt ended."""
    assert_generates(model(**WIDE | tables), engine, ["abc", "d"], Request(12))


@pytest.mark.gpu
def test_two_captured_models_do_not_interfere() -> None:
    """One is captured between two replays of the other, on a separate stream."""
    built = [place(model({"kind": "multi_gate"}, **WIDE), torch.device("cuda"), "float32") for _ in range(2)]
    plain, replayed = ([Generator(b, Tokenizer.bytes(), engine=e) for b in built] for e in ("eager", "graph"))
    prompts = ["abc", "d", "ef"]  # more rows than whole layers in one launch take
    for turn in (0, 1, 0, 1):
        assert replayed[turn](prompts, Request(12))[0] == plain[turn](prompts, Request(12))[0]
