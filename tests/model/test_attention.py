"""Softmax attention and projection mixing against their equations: values, and every gradient."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import residua
from residua.config import choices
from residua.model.added_values import ValueEmbedding
from residua.model.anchor_kinds import build_source
from residua.model.anchor_source import ExoSource
from residua.model.anchors import LayerPlace
from residua.model.attention import SoftmaxAttention, head_shape, layer_place
from residua.model.context import Context
from residua.model.rope import rotary_table
from residua.model.sdpa import attend
from tests.golden import attention as golden
from tests.golden.compare import agree, close, leaves_of, random, randomise
from tests.model.small import small

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, HEADS, HEAD_DIM, THETA, VOCABULARY = 2, 3, 7, 4, 6, 50.0, 5
POSITIONS = torch.arange(LENGTH)
DOCUMENTS = [[0, 0, 1], [5, 2, 2]]


def attention_config(**options) -> choices.SoftmaxAttention:
    return choices.SoftmaxAttention(heads=HEADS, head_dim=HEAD_DIM, rope_theta=THETA, **options)


def context(documents: list[list[int]] | None = None) -> Context:
    table = golden.rotary(POSITIONS, HEAD_DIM, THETA)
    return Context((*table, POSITIONS), None if documents is None else torch.tensor(documents))


def place(config: choices.SoftmaxAttention, anchors: choices.Anchors, layer: int, layers: int) -> LayerPlace:
    taken = anchors.taken(layer)
    return layer_place(config, layer, range(layers), WIDTH, std=0.3, vocabulary=VOCABULARY, taken=taken)


def build_layers(
    config: choices.SoftmaxAttention, anchors: choices.Anchors, layers: int
) -> tuple[nn.ModuleList, nn.Module]:
    """Attention layers and the source of their anchors, with random parameters, in float64."""
    attentions = nn.ModuleList(
        SoftmaxAttention(config, anchors, layer, place(config, anchors, layer, layers), output_std=0.3)
        for layer in range(layers)
    )
    source = build_source(anchors, head_shape(config, WIDTH), WIDTH, std=0.3)
    randomise(attentions), randomise(source, seed=3)
    return attentions, source


def own_projections(layer: SoftmaxAttention, config: choices.SoftmaxAttention, x: Tensor) -> golden.Projections:
    """q, k, v and the gate of one sequence, from the layer's fused matrix, less those of other layers."""
    kv, as_values = config.kv_heads or HEADS, config.values == "keys"
    heads = {"q": HEADS, "k": kv, "v": kv} | ({} if config.gate == "none" else {"g": HEADS})
    heads = {s: n for s, n in heads.items() if s not in layer.mix.taken and not (as_values and s == "v")}
    width = config.head_dim or HEAD_DIM
    rows = {s: n * width for s, n in heads.items()} | ({"g": HEADS} if config.gate == "headwise" else {})
    sizes = [rows[s] for s in heads]
    biases = [None] * len(heads) if config.bias == "none" else layer.project.bias.split(sizes)
    parts = zip(heads.items(), layer.project.weight.split(sizes), biases, strict=True)
    S = {s: golden.project(x, W, n, b) for (s, n), W, b in parts}
    if as_values:
        S["v"] = S["k"]
    return S | ({"v": golden.normed(S["v"], torch.ones(1), config.qk_eps)} if config.qk_norm == "rms_qkv" else {})


def rest_of_layer(
    layer: SoftmaxAttention, S: golden.Projections, documents: list[int] | None, theta: float = THETA
) -> Tensor:
    normed = hasattr(layer.qk_norm, "query")
    return golden.attention(
        S,
        layer.out.weight,
        theta=theta,
        q_gain=layer.qk_norm.query if normed else None,
        k_gain=layer.qk_norm.key if normed else None,
        sink=layer.sink,
        removes_own=layer.removes_own,
        documents=documents,
        window=layer.window,
        softcap=layer.softcap,
        growth=layer.growth and (layer.growth.beta, layer.growth.original_context),
        eps=layer.qk_norm.eps,
        b_out=getattr(layer.out, "bias", None),
    )


VARIANTS = [
    {},
    {"kv_heads": 1},
    {"kv_heads": 2},
    {"qk_norm": "none"},
    {"gate": "elementwise"},
    {"gate": "headwise", "kv_heads": 2},
    {"sink": "learned"},
    {"sink": "learned", "kv_heads": 2, "gate": "elementwise"},
    {"window": 2},
    {"window": 3, "sink": "learned", "kv_heads": 2},
    {"softcap": 0.7, "kv_heads": 2},
    {"softcap": 0.7, "sink": "learned", "window": 2},
    {"query_growth": {"beta": 0.7, "original_context": 1}, "window": 2},
    {"bias": "qkv", "gate": "headwise"},
    {"bias": "all", "qk_norm": "none", "window": 1},
    {"qk_norm": "rms_all", "kv_heads": 2, "qk_eps": 0.1},
    {"qk_eps": 0.1},
    {"qk_norm": "rms_qkv", "kv_heads": 2, "qk_eps": 0.1},
    {"qk_norm": "rms_qkv", "values": "keys", "gate": "headwise"},
    {"values": "keys", "kv_heads": 2, "gate": "elementwise", "bias": "qkv"},
]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_attention_matches_its_equation(options: dict, documents: list[list[int]] | None) -> None:
    config = attention_config(**options)
    (layer,), _ = build_layers(config, choices.NoAnchors(), 1)
    x = random(BATCH, LENGTH, WIDTH)
    ours, _ = layer(x, (), context(documents))
    expected = torch.stack(
        [rest_of_layer(layer, own_projections(layer, config, x[b]), documents and documents[b]) for b in range(BATCH)]
    )
    agree([ours], [expected], leaves_of(layer, x=x))


def test_global_layers_can_have_different_heads() -> None:
    full = {"head_dim": 4, "kv_heads": 1, "values": "keys"}
    windows = {"window": 2, "window_layers": (0,), "local_rope_theta": 9.0}
    config = attention_config(qk_norm="rms_qkv", kv_heads=2, full=full, **windows)
    at = Context((*golden.rotary(POSITIONS, 4, THETA), *golden.rotary(POSITIONS, HEAD_DIM, 9.0)), None)
    x = random(BATCH, LENGTH, WIDTH)
    for number, theta in enumerate((9.0, THETA)):
        mixer = config.at(number)
        place_of = layer_place(mixer, number, range(2), WIDTH, std=0.3)
        layer = SoftmaxAttention(mixer, choices.NoAnchors(), number, place_of, output_std=0.3)
        randomise(layer)
        ours, _ = layer(x, (), at)
        alone = [rest_of_layer(layer, own_projections(layer, mixer, x[b]), None, theta) for b in range(BATCH)]
        agree([ours], [torch.stack(alone)], leaves_of(layer, x=x))
    (as_values,), _ = build_layers(attention_config(values="keys"), choices.NoAnchors(), 1)
    assert not as_values.direct_to_cache  # kernels look for a projection of values
    model = residua.build(small(attention=config.model_dump()))
    assert [part.shape[-1] for part in model._rotary(torch.zeros(1, 3))] == [2, 2, 3, 3]


def test_the_rotary_table_is_exact_to_single_precision() -> None:
    cos, sin = rotary_table(torch.arange(50), HEAD_DIM, 10_000.0)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (50, HEAD_DIM // 2)
    for position, i in product(range(50), range(HEAD_DIM // 2)):
        angle = position * 10_000.0 ** (-2 * i / HEAD_DIM)
        assert abs(cos[position, i].item() - math.cos(angle)) < 1e-5
        assert abs(sin[position, i].item() - math.sin(angle)) < 1e-5


def test_sink_of_minus_infinity_equals_no_sink() -> None:
    q, k, v = (random(1, LENGTH, n, HEAD_DIM, seed=i, grad=False) for i, n in enumerate((HEADS, 2, 2)))
    sink = torch.full((HEADS,), float("-inf"), dtype=torch.float64)
    close("output", attend(q, k, v, sink=sink), attend(q, k, v), 1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 1.5], ids=["no cap", "cap"])
@pytest.mark.parametrize("window", [None, 7], ids=["all tokens", "window"])
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
def test_gpu_attention_equals_cpu_attention(
    documents: bool, sink: bool, window: int | None, softcap: float | None
) -> None:
    """Flex attention there, dense here."""
    q, k, v = (torch.randn(2, 100, n, 16) for n in (HEADS, 2, 2))
    probe = torch.randn(2, 100, HEADS, 16)
    options = {"segments": torch.arange(100).expand(2, -1) // 30} if documents else {}
    options |= {"sink": torch.randn(HEADS)} if sink else {}
    results = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).requires_grad_() for t in (q, k, v, *([options["sink"]] if sink else []))]
        moved = {name: t.to(device) for name, t in options.items()} | ({"sink": leaves[3]} if sink else {})
        y = attend(*leaves[:3], **moved, window=window, softcap=softcap)
        gradients = torch.autograd.grad((y * probe.to(device)).sum(), leaves)
        results.append([t.detach().cpu() for t in (y, *gradients)])
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=5e-3, atol=5e-3)


def lambdas(layer: SoftmaxAttention) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return dict(layer.mix.anchor_scale.items()), dict(layer.mix.current_scale.items())


def gamma_of(layer: SoftmaxAttention) -> tuple[Tensor, Tensor, Tensor] | None:
    gamma = getattr(layer.mix, "gamma", None)
    return None if gamma is None else (gamma.down.weight, gamma.up.weight, gamma.bias)


def exo_anchors(
    source: ExoSource, anchors: choices.ExoFormer, config: choices.SoftmaxAttention, embedding: Tensor
) -> golden.Projections:
    """Dedicated projections of the raw embedding, normalised where the configuration says."""
    kv = config.kv_heads or HEADS
    heads = {"q": HEADS, "k": kv, "v": kv, "g": HEADS}
    matrices = source.project.weight.split([heads[s] * HEAD_DIM for s in anchors.pathways])
    raw = {s: golden.project(embedding, W, heads[s]) for s, W in zip(anchors.pathways, matrices, strict=True)}
    return normed_anchors(raw, anchors.norm, source.norm.gains)


def normed_anchors(raw: golden.Projections, norm: str, gains: nn.ParameterDict) -> golden.Projections:
    chosen = {"none": "", "qk": "qk", "all": "qkvg"}[norm]
    return {s: golden.normed(a, gains[s] if s in chosen else None) for s, a in raw.items()}


def run_ours(
    layers: Sequence[nn.Module],
    source: nn.Module,
    embedding: Tensor,
    inputs: list[Tensor],
    tokens: Tensor | None = None,
) -> list[Tensor]:
    anchors = source.open(embedding)
    outputs = []
    for layer, x in zip(layers, inputs, strict=True):
        y, anchors = layer(x, anchors, context()._replace(tokens=tokens))
        outputs.append(y)
    return outputs


def run_golden(layers, source, anchors, config, embedding: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """All layers of every sequence; `inputs` are the pre-normed inputs of the layers."""
    outputs: list[list[Tensor]] = [[] for _ in layers]
    for b in range(BATCH):
        kept = None
        if anchors.kind == "exoformer":
            kept = exo_anchors(source, anchors, config, embedding[b])
        for at, (layer, x) in enumerate(zip(layers, inputs, strict=True)):
            S = own_projections(layer, config, x[b])
            if kept is None:
                pathways = ("v",) if anchors.kind == "resformer" else anchors.pathways
                norm = "none" if anchors.kind == "resformer" else anchors.norm
                kept = normed_anchors({s: S[s] for s in pathways}, norm, layer.mix.norm.gains)
            else:
                S = golden.mixed(x[b], S, kept, *lambdas(layer), gamma_of(layer))
            outputs[at].append(rest_of_layer(layer, S, None))
    return [torch.stack(o) for o in outputs]


def check_mixing(anchors: choices.Anchors, config: choices.SoftmaxAttention, layers: int = 2) -> None:
    attentions, source = build_layers(config, anchors, layers)
    embedding = random(BATCH, LENGTH, WIDTH, seed=50)
    inputs = [random(BATCH, LENGTH, WIDTH, seed=60 + i) for i in range(layers)]
    ours = run_ours(attentions, source, embedding, inputs)
    expected = run_golden(attentions, source, anchors, config, embedding, inputs)
    leaves = dict(attentions.named_parameters()) | {f"source.{n}": p for n, p in source.named_parameters()}
    leaves |= {f"input {i}": x for i, x in enumerate(inputs)}
    if anchors.kind == "exoformer":
        leaves["embedding"] = embedding
    agree(ours, expected, leaves)


GRANULARITIES = ("elementwise", "headwise", "scalar")
GATED = attention_config(gate="elementwise", kv_heads=2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_resformer_matches_its_equation(granularity: str, gate: str) -> None:
    """With a gate it is the paper's naive combination."""
    check_mixing(choices.ResFormer(granularity=granularity), attention_config(gate=gate), layers=3)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("norm", ["none", "qk", "all"])
@pytest.mark.parametrize("kind", [choices.NuResFormer, choices.ExoFormer])
def test_projection_anchors_match_their_equation(kind: type, granularity: str, norm: str) -> None:
    check_mixing(kind(granularity=granularity, norm=norm), GATED)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("kind", [choices.NuResFormer, choices.ExoFormer])
def test_dynamic_mixing_matches_its_equation(kind: type, granularity: str) -> None:
    check_mixing(kind(granularity=granularity, mixing=choices.DynamicMixing(hidden=5)), GATED)


PATHWAYS = [("q",), ("k",), ("v",), ("g",), ("q", "k"), ("v", "k"), ("q", "k", "v"), ("g", "v", "k", "q")]


@pytest.mark.parametrize("pathways", PATHWAYS, ids="".join)
@pytest.mark.parametrize("mixing", [choices.StaticMixing(), choices.DynamicMixing(hidden=3)], ids=lambda m: m.kind)
def test_any_subset_of_pathways_can_be_mixed_in_any_order(pathways: tuple[str, ...], mixing: choices.Mixing) -> None:
    check_mixing(choices.ExoFormer(pathways=pathways, mixing=mixing), GATED, layers=1)
    check_mixing(choices.NuResFormer(pathways=pathways, mixing=mixing), GATED)


Equation = Callable[[Sequence[Any], list[golden.Projections], list[Tensor], int], Iterable[Tensor]]
"""Takes layers, and of sequence b their own projections, their inputs and b; returns the layers' outputs."""


def check_layers(
    config: choices.SoftmaxAttention,
    anchors: choices.Anchors,
    count: int,
    equation: Equation,
    tokens: Tensor | None = None,
) -> None:
    """The layers' outputs and every gradient, without anchors from the embedding."""
    layers, source = build_layers(config, anchors, count)
    inputs = [random(BATCH, LENGTH, WIDTH, seed=60 + i) for i in range(count)]
    rows = []
    for b in range(BATCH):
        own = [own_projections(layer, config, x[b]) for layer, x in zip(layers, inputs, strict=True)]
        rows.append(list(equation(layers, own, [x[b] for x in inputs], b)))
    expected = [torch.stack(outputs) for outputs in zip(*rows, strict=True)]
    leaves = dict(layers.named_parameters()) | {f"input {i}": x for i, x in enumerate(inputs)}
    agree(run_ours(layers, source, inputs[0], inputs, tokens), expected, leaves)


@pytest.mark.parametrize("gate", ["relu", "sigmoid", "tanh", "softmax"])
def test_gated_values_match_their_equation(gate: str) -> None:
    def equation(layers: Any, own: list[golden.Projections], x: list[Tensor], b: int) -> list[Tensor]:
        first, second = own
        second["v"] = golden.gate_values(x[1], second["v"], first["v"], layers[1].mix.gates.weight, gate)
        return [rest_of_layer(layer, S, None) for layer, S in zip(layers, own, strict=True)]

    check_layers(attention_config(kv_heads=2), choices.GatedValue(gate=gate), 2, equation)


def test_value_embeddings_match_their_equation() -> None:
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))

    def equation(layers: Any, own: list[golden.Projections], x: list[Tensor], b: int) -> list[Tensor]:
        for at in (0, 2):  # every second layer, and the last
            weights = layers[at].mix.table.weight, layers[at].mix.gate_weight
            own[at]["v"] = golden.embed_values(x[at], own[at]["v"], tokens[b], *weights, 2.5)
        return [rest_of_layer(layer, S, None) for layer, S in zip(layers, own, strict=True)]

    anchors = choices.ValueEmbeddings(gate_channels=5, gate_scale=2.5)
    check_layers(attention_config(kv_heads=2), anchors, 3, equation, tokens)


@torch.no_grad()
def test_value_embeddings_alternate_up_to_the_last_layer() -> None:
    model = residua.build(small(layers=5, anchors={"kind": "value_embeddings"}, init={"std": 0.05}))
    mixes = [sublayer.body.mix for sublayer in model.sublayers[::2]]
    assert [isinstance(mix, ValueEmbedding) for mix in mixes] == [True, False, True, False, True]
    assert float(mixes[4].table.weight.std()) == pytest.approx(0.05, rel=0.1)
    assert float(mixes[4].gate(torch.zeros(1, 1, 16)).mean()) == 1.5  # 3 σ(0)


@pytest.mark.parametrize("gate", ["none", "elementwise"])
def test_outputs_without_their_own_value_match_their_equation(gate: str) -> None:
    """With value residuals, so that the value taken out is the mixed one."""
    config = attention_config(kv_heads=2, gate=gate, own_value="removed", sink="learned")
    check_mixing(choices.ResFormer(), config)
