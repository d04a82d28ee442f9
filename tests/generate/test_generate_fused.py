"""A model rewritten for decoding, its junctions fused with the norms after them, gives the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import residua
from residua.data.tokenizer import Tokenizer
from residua.generate.fused_decoder import FusedAttention, FusedFFN, fuse
from residua.generate.generator import Generator, Request, prefill
from residua.generate.sample import Sampling
from residua.model.decoder import Decoder
from residua.model.fold import fold_mixing
from residua.model.topology.fused import FusedAdditive, FusedBlock, FusedMultiGate, FusedTopology
from residua.ops import decode
from residua.ops._runtime.backend import Operator
from residua.storage.model_folder import place
from tests.model.small import small
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

BLOCK = {"kind": "block_attnres"}
TOPOLOGIES: dict[str, tuple[dict[str, Any], type[FusedTopology]]] = {
    "additive": ({"kind": "additive"}, FusedAdditive),
    "blocks of one": (BLOCK | {"sublayers_per_block": 1}, FusedBlock),
    "blocks of two": (BLOCK | {"sublayers_per_block": 2, "scale": 0.5}, FusedBlock),
    "blocks of three": (BLOCK | {"sublayers_per_block": 3}, FusedBlock),
    "a last block cut short": (BLOCK | {"sublayers_per_block": 4}, FusedBlock),
    "one block": (BLOCK | {"sublayers_per_block": 6}, FusedBlock),
    "full": ({"kind": "full_attnres"}, FusedBlock),
    "two streams": ({"kind": "multi_gate", "streams": 2}, FusedMultiGate),
    "four streams": ({"kind": "multi_gate"}, FusedMultiGate),
    "independent gates": ({"kind": "multi_gate", "streams": 3, "gate": "independent"}, FusedMultiGate),
}


def model(topology: dict[str, Any], **tables: Any) -> Decoder:
    built = residua.build(small(topology=topology, **tables)).eval()
    for name, parameter in built.named_parameters():
        if "topology" in name or "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)
    return built


@torch.no_grad()
def decoded(built: Decoder, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits after the last two tokens, by the rewritten model one by one and by the model in one pass."""
    cache = built.new_cache(len(tokens), 8)
    prefill(built, cache, tokens[:, :-2].tolist())
    rewritten = fuse(built, 8)
    steps = [rewritten(tokens[:, t : t + 1], cache=cache) for t in (-2, tokens.shape[1] - 1)]
    return torch.cat(steps, 1), built(tokens)[:, -2:]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_two_phase_and_fused_junctions_equal_direct_ones(name: str) -> None:
    topology, kind = TOPOLOGIES[name]
    built = model(topology).double()
    assert isinstance(fuse(built, 8).topology, kind)
    # queries are prepared in float32, which is where the difference comes from
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "attention",
    [
        {"heads": 2, "gate": "elementwise"},
        {"heads": 4, "kv_heads": 2, "gate": "headwise"},
        {"heads": 2, "qk_norm": "none", "sink": "learned"},
    ],
)
def test_heads_that_go_straight_into_the_cache_attend_as_others_do(attention: dict[str, Any]) -> None:
    built = model({"kind": "additive"}, attention={"kind": "softmax"} | attention).double()
    assert isinstance(fuse(built, 8).sublayers[0].body, FusedAttention)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=1e-12)


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
def test_interpreted_kernels_decode_what_the_model_does(
    name: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    operators = [getattr(decode, name) for name in decode.__all__]

    def fused_where_decoding(self: Any, *args: Any, **settings: Any) -> Any:
        return (self.fused if self in operators else self.reference)(*args, **settings)

    monkeypatch.setattr(Operator, "__call__", fused_where_decoding)
    built = model(TOPOLOGIES[name][0], layers=layers)
    assert isinstance(fuse(built, 8).topology, FusedTopology)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["swiglu", "glu", "relu2", "gelu"])
def test_a_feed_forward_whose_activation_is_one_kernel_is_the_same_map(kind: str) -> None:
    built = model({"kind": "additive"}, ffn={"kind": kind, "hidden": 24}).double()
    assert isinstance(fuse(built, 8).sublayers[1], FusedFFN)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "tables",
    [
        {"norm": {"kind": "gatednorm", "rank": 4}},
        {"topology": {"kind": "full_attnres", "window": 2}},
        {"topology": {"kind": "hyper"}},
        {"topology": BLOCK | {"sublayers_per_block": 2, "activation": "sigmoid"}},
        {"anchors": {"kind": "nuresformer", "pathways": ["k", "v"]}},
        {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}},
    ],
)
def test_what_has_no_fused_form_stays_as_it_is(tables: dict[str, Any]) -> None:
    built = residua.build(small(**tables)).double()
    rewritten = fuse(built, 8)
    kept = rewritten.topology is built.topology, rewritten.sublayers[-2].body is built.sublayers[-2].body
    assert any(kept)
    assert kept[0] == (rewritten.norm is built.norm)
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=1e-12)


@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
@pytest.mark.parametrize("folded", [False, True])
def test_values_are_mixed_on_their_way_into_the_cache(granularity: str, folded: bool) -> None:
    attention = {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "headwise"}
    built = residua.build(
        small(attention=attention, anchors={"kind": "resformer", "granularity": granularity}, layers=3)
    )
    for name, parameter in built.double().eval().named_parameters():
        if "scale" in name:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    if folded:
        assert fold_mixing(built) == 2
    assert all(isinstance(sublayer.body, FusedAttention) for sublayer in fuse(built, 8).sublayers[::2])
    torch.testing.assert_close(*decoded(built, torch.randint(23, (2, 5))), rtol=0, atol=1e-6)


def test_the_rewritten_model_shares_every_weight_and_leaves_the_model_alone() -> None:
    built = model(BLOCK | {"sublayers_per_block": 2})
    names = set(built.state_dict())
    rewritten = fuse(built, 8)
    assert rewritten.embed.weight is built.embed.weight
    assert rewritten.sublayers[1].body is built.sublayers[1].body
    assert rewritten.sublayers[0].body.attention is built.sublayers[0].body
    assert set(built.state_dict()) == names


@pytest.mark.parametrize("name", only_nightly(["additive", "blocks of two", "four streams"], but=["four streams"]))
@pytest.mark.parametrize("anchors", only_nightly(["none", "resformer"], but=["resformer"]))
def test_a_step_is_traced_whole(name: str, anchors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiled(f, backend="eager", **options))
    built = model(TOPOLOGIES[name][0], vocab_size=257, context=48, anchors={"kind": anchors})
    plain, traced = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", "compile"))
    assert traced(["abc", "d"], Request(4))[0] == plain(["abc", "d"], Request(4))[0]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "anchors"),
    [*((name, "none") for name in TOPOLOGIES), ("additive", "resformer"), ("two streams", "resformer")],
)
@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_a_replayed_graph_generates_what_plain_steps_do(name: str, anchors: str, engine: str) -> None:
    torch.compiler.reset()  # one function is compiled for every case, and there is a limit to that
    tokenizer = Tokenizer.bytes()
    tables = {"vocab_size": 257, "context": 48, "width": 64, "attention": {"kind": "softmax", "heads": 4}}
    tables["anchors"] = {"kind": anchors}
    built = place(model(TOPOLOGIES[name][0], **tables), torch.device("cuda"), "float32")
    prompts = ["hello there", "a", "some more text"]
    for sampling in (Sampling(), Sampling(1.0, top_k=20, seed=1)):
        plain, replayed = (Generator(built, tokenizer, engine=kind) for kind in ("eager", engine))
        assert replayed(prompts, Request(24, sampling))[0] == plain(prompts, Request(24, sampling))[0]
        # the captured step serves the next prompts too
        assert replayed(prompts[::-1], Request(20, sampling))[0] == plain(prompts[::-1], Request(20, sampling))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("engine", ["graph", "compile"])
@pytest.mark.parametrize("gate", ["competitive", "independent"])
def test_graph_of_wide_streams_generates_what_plain_steps_do(gate: str, engine: str, rows: int) -> None:
    torch.compiler.reset()
    tables = {"vocab_size": 257, "context": 48, "width": 512, "attention": {"kind": "softmax", "heads": 4}}
    built = place(model({"kind": "multi_gate", "gate": gate}, **tables), torch.device("cuda"), "float32")
    prompts = [chr(97 + row) * (1 + row % 5) for row in range(rows)]
    plain, replayed = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", engine))
    for again in (prompts, prompts[::-1]):
        assert replayed(again, Request(24))[0] == plain(again, Request(24))[0]


@pytest.mark.gpu
def test_two_captured_models_do_not_disturb_each_other() -> None:
    """One is captured between two replays of the other, on a stream of its own."""
    tables = {"vocab_size": 257, "context": 48, "width": 64, "attention": {"kind": "softmax", "heads": 4}}
    built = [place(model({"kind": "multi_gate"}, **tables), torch.device("cuda"), "float32") for _ in range(2)]
    plain, replayed = ([Generator(b, Tokenizer.bytes(), engine=e) for b in built] for e in ("eager", "graph"))
    prompts = ["abc", "d", "ef"]  # more rows than whole layers in one launch take
    for turn in (0, 1, 0, 1):
        assert replayed[turn](prompts, Request(12))[0] == plain[turn](prompts, Request(12))[0]


@pytest.mark.gpu
def test_a_graph_of_a_recurrent_mixer_starts_where_the_prompt_ended() -> None:
    tables = {"vocab_size": 257, "context": 48, "width": 32}
    linear = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 16}
    built = place(model({"kind": "additive"}, attention=linear, **tables), torch.device("cuda"), "float32")
    plain, replayed = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", "graph"))
    assert replayed(["abc", "d"], Request(12))[0] == plain(["abc", "d"], Request(12))[0]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "compile"])
def test_a_graph_of_a_mixture_generates_what_plain_steps_do(engine: str) -> None:
    torch.compiler.reset()
    tables = {"vocab_size": 257, "context": 48, "width": 64, "attention": {"kind": "softmax", "heads": 4}}
    experts = {"kind": "moe", "hidden": 32, "experts": 8, "top_k": 2}
    built = place(model({"kind": "additive"}, ffn=experts, **tables), torch.device("cuda"), "float32")
    plain, replayed = (Generator(built, Tokenizer.bytes(), engine=kind) for kind in ("eager", engine))
    assert replayed(["abc", "d"], Request(12))[0] == plain(["abc", "d"], Request(12))[0]
