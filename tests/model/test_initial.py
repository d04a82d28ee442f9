"""Initial values of models, as published, for every way of building them."""

import math

import pytest
import torch

import residua
from residua.config import choices
from residua.config.model import ModelConfig
from residua.model import taps
from residua.model.decoder import Decoder
from residua.model.topology import build_topology
from tests.golden import multigate
from tests.golden.compare import close
from tests.model.depth import SMALL, drive, embedding_and_outputs
from tests.model.small import small, tokens_and_targets

pytestmark = pytest.mark.slow


def unfilled(config: ModelConfig) -> Decoder:
    """Built without memory and materialised as NaN."""
    with torch.device("meta"):
        model = residua.build(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    return model


def from_meta(config: ModelConfig) -> Decoder:
    """Built without memory, materialised as NaN, then initialised: a parameter that is left out stays NaN."""
    model = unfilled(config)
    model.reset_parameters()
    return model


BUILDS = {"built": residua.build, "built on meta": from_meta}


@pytest.mark.parametrize("how", BUILDS)
@pytest.mark.parametrize("name", ["full_attnres", "full_attnres window", "full_attnres raw keys", "block_attnres"])
def test_zero_queries_give_uniform_depth_weights(name: str, how: str) -> None:
    model = BUILDS[how](small(topology=SMALL[name].model_dump(exclude_none=True)))
    tokens, _ = tokens_and_targets()
    with taps.record() as seen:
        model(tokens)
    counts = {
        "full_attnres": [2, 3, 4, 5, 6, 7],
        "full_attnres raw keys": [2, 3, 4, 5, 6, 7],
        "full_attnres window": [2, 3, 3, 3, 3, 3],
        "block_attnres": [2, 2, 2, 3, 3, 3],
    }[name]
    for k, sources in enumerate(counts):
        weights = seen[f"depth.{k}.weights"]
        assert weights.shape == (2, 6, sources)
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / sources), atol=1e-7, rtol=0)


@pytest.mark.parametrize("how", BUILDS)
def test_multi_gate_pools_start_uniform(how: str) -> None:
    model = BUILDS[how](small(topology={"kind": "multi_gate", "streams": 3}))
    with taps.record() as seen:
        model(tokens_and_targets()[0])
    for k, streams in enumerate([2, 3, 3, 3, 3, 3]):
        torch.testing.assert_close(seen[f"depth.{k}.weights"], torch.full((2, 6, streams), 1 / streams))


GATES = [("competitive", "corrected"), ("independent", "corrected"), ("independent", "printed")]


@pytest.mark.parametrize(("gate", "formula"), GATES)
@pytest.mark.parametrize(("layers", "n"), [(12, 4), (24, 4), (36, 4), (12, 8), (36, 8), (3, 2)])
def test_multi_gate_initial_beta_matches_its_formula(layers: int, n: int, gate: str, formula: str) -> None:
    lerping = 2 * layers - (n - 1)
    topology = build_topology(choices.MultiGate(streams=n, gate=gate, bias_init=formula), 2 * layers, 4).double()
    x, y = embedding_and_outputs(2 * layers, 4, length=1)
    with taps.record() as seen, torch.no_grad():
        drive(topology, x, y)
    expected = multigate.intended_beta(lerping)
    if formula == "printed":
        expected = 1 / (1 + math.exp(multigate.initial_bias(lerping, n)))
    assert sum(name.endswith(".beta") for name in seen) == lerping
    for k in range(n - 1, 2 * layers):
        beta = seen[f"depth.{k}.beta"]
        assert beta.shape == (2, 1, n)
        close("β", beta, torch.full_like(beta, expected), 1e-6)


def test_initial_beta_at_the_papers_sizes_is_as_published() -> None:
    """S, M and L with four competitive streams, and the values of the printed independent formula."""
    lerping = [2 * layers - 3 for layers in (12, 24, 36)]
    assert [round(multigate.intended_beta(n), 4) for n in lerping] == [0.0474, 0.0324, 0.0262]
    printed = [1 / (1 + math.exp(multigate.initial_bias(n, 4))) for n in lerping]
    assert [round(b, 4) for b in printed] == [0.0553, 0.0359, 0.0284]


@pytest.mark.parametrize("gate", ["scalar", "elementwise"])
def test_the_highway_starts_like_multi_gate_with_one_stream(gate: str) -> None:
    topology = build_topology(choices.Highway(gate=gate), 8, 5).double()
    x, y = embedding_and_outputs(8, 5)
    with taps.record() as seen:
        drive(topology, x, y)
    for k in range(8):
        beta = seen[f"depth.{k}.beta"]
        close("T", beta, torch.full_like(beta, multigate.intended_beta(8)), 1e-6)


@pytest.mark.parametrize("how", BUILDS)
@pytest.mark.parametrize("kind", ["nuresformer", "exoformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dynamic_gamma_is_exactly_one_half(kind: str, how: str, dtype: torch.dtype) -> None:
    tables = {"anchors": {"kind": kind, "mixing": {"kind": "dynamic"}}}
    config = small(attention={"kind": "softmax", "heads": 2, "gate": "elementwise"}, **tables)
    model = BUILDS[how](config).to(dtype)
    x = torch.randn(2, 6, 16, dtype=dtype)
    mixes = [s.body.mix for s in model.sublayers[::2] if hasattr(s.body.mix, "gamma")]
    assert len(mixes) == (3 if kind == "exoformer" else 2)
    for mix in mixes:
        gamma = mix.gamma(x)
        assert gamma.shape == (2, 6, 8)
        assert (gamma == 0.5).all()
        assert all((scale == 1.0).all() for scale in (*mix.anchor_scale.values(), *mix.current_scale.values()))
        assert torch.equal(mix.factors(x), gamma)


@pytest.mark.parametrize("how", BUILDS)
@pytest.mark.parametrize("granularity", ["elementwise", "headwise", "scalar"])
def test_static_lambdas_start_at_one_half(granularity: str, how: str) -> None:
    anchors = {"kind": "exoformer", "pathways": ["k", "v"], "granularity": granularity}
    model = BUILDS[how](small(anchors=anchors, attention={"kind": "softmax", "heads": 4, "kv_heads": 2}))
    shape = {"elementwise": (2, 4), "headwise": (2,), "scalar": ()}[granularity]
    for sublayer in model.sublayers[::2]:
        for scale in (*sublayer.body.mix.anchor_scale.values(), *sublayer.body.mix.current_scale.values()):
            assert scale.shape == shape and (scale == 0.5).all()


def test_gated_norms_start_at_half_or_with_a_gradient() -> None:
    tokens, targets = tokens_and_targets()
    model = residua.build(small(norm={"kind": "gatednorm"}))
    norm, x = model.sublayers[0].norm, torch.randn(2, 6, 16)
    torch.testing.assert_close(norm(x), 0.5 * residua.ops.rms(x))
    for activation in ("tanh", "silu", "identity"):
        model = residua.build(small(norm={"kind": "gatednorm", "activation": activation}))
        model.loss(tokens, targets).backward()
        assert model.sublayers[0].norm.gate.down.grad.abs().max() > 0


def test_mhc_mixing_starts_near_the_identity() -> None:
    for config, slack in ((choices.ManifoldHyper(), 0.05), (choices.ManifoldHyperLite(), 0.01)):
        topology = build_topology(config, 4, 7).double()
        x, y = embedding_and_outputs(4, 7)
        with taps.record() as seen:
            drive(topology, x, y)
        for k in range(4):
            mix = seen[f"depth.{k}.mix"]
            assert (mix - torch.eye(4)).abs().max() < slack


def test_mhc_lite_starts_with_the_published_biases() -> None:
    """Identity permutation 0, the others −8, scales 0.01, maps 0."""
    topology = build_topology(choices.ManifoldHyperLite(streams=3), 4, 7)
    for junction in topology.junctions:
        assert junction.bias[6:].tolist() == [0.0] + [-8.0] * 5
        assert (junction.alpha == 0.01).all() and (junction.phi == 0).all()


@pytest.mark.parametrize("output", ["normal", "scaled", "zero"])
def test_output_projections_start_as_configured(output: str) -> None:
    model = residua.build(small(width=64, init={"std": 0.1, "output": output}, ffn={"kind": "gelu", "hidden": 256}))
    expected = {"normal": 0.1, "scaled": 0.1 / math.sqrt(6), "zero": 0.0}[output]
    for sublayer in model.sublayers:
        assert abs(sublayer.body.out.weight.std().item() - expected) <= 0.05 * expected
    assert abs(model.sublayers[1].body.up.weight.std().item() - 0.1) < 0.005


PARTS = {
    **{f"topology {n}": {"topology": t.model_dump(exclude_none=True)} for n, t in SMALL.items()},
    **{
        f"norm {kind}": {"norm": {"kind": kind}}
        for kind in ("rmsnorm", "preaffine", "gatednorm", "dyt", "derf", "gated_dyt")
    },
    "layernorm and learned positions": {"norm": {"kind": "layernorm"}, "learned_positions": 8},
    **{f"ffn {kind}": {"ffn": {"kind": kind, "hidden": 24}} for kind in ("swiglu", "glu", "relu2", "gelu")},
    "resformer": {"anchors": {"kind": "resformer"}},
    "nuresformer": {"anchors": {"kind": "nuresformer", "pathways": ["q", "k", "v"]}},
    "exoformer": {
        "anchors": {"kind": "exoformer", "mixing": {"kind": "dynamic"}},
        "attention": {"kind": "softmax", "heads": 2, "gate": "elementwise", "sink": "learned"},
    },
    "gated_deltanet": {"attention": {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}},
    "untied": {"head": {"kind": "untied"}},
    "zero": {"head": {"kind": "untied", "init": "zero"}, "init": {"output": "zero"}},
}


@pytest.mark.parametrize("name", PARTS)
def test_model_built_on_meta_starts_like_one_built_directly(name: str) -> None:
    """Constants are equal, random values have the same spread, and no parameter is left out."""
    config = small(**PARTS[name])
    torch.manual_seed(1)
    first = residua.build(config)
    torch.manual_seed(2)
    second = residua.build(config)
    made = from_meta(config)
    values = [dict((*m.named_parameters(), *m.named_buffers())) for m in (first, second, made)]
    assert values[0].keys() == values[2].keys()
    for key, value in values[0].items():
        late = values[2][key]
        assert late.isfinite().all(), key
        if torch.equal(value, values[1][key]):
            assert torch.equal(late, value), key
        elif value.numel() > 100:
            assert abs(late.std().item() / value.std().item() - 1) < 0.3, key


LATENT = {"kind": "mla", "heads": 2, "head_dim": 4, "shared_dim": 2, "rank": 8, "query_rank": 8}
DELTA = {"kind": "kimi_delta", "heads": 2, "head_dim": 8}
EXPERTS = {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2}
EVERY_PART = PARTS | {
    "topology boundary_attnres": {"topology": {"kind": "boundary_attnres", "sublayers_per_block": 2}},
    "kimi_delta and mla": {"attention": {"kind": "hybrid", "softmax_every": 2, "softmax": LATENT, "linear": DELTA}},
    "experts": {"ffn": EXPERTS | {"router": {"kind": "sigmoid_scores"}, "shared_gate": "sigmoid"}},
}


@pytest.mark.parametrize("name", EVERY_PART)
def test_saved_tensors_are_sufficient_to_restore_a_model(name: str) -> None:
    """Built without memory and loaded with the tensors of another, it computes the same."""
    config = small(**EVERY_PART[name])
    old, new = residua.build(config), unfilled(config)
    new.load_state_dict(old.state_dict())
    tokens, _ = tokens_and_targets()
    with torch.no_grad():
        assert torch.equal(new(tokens), old(tokens))
