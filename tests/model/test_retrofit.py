"""Retrofits: a model that starts from another keeps its function, as closely as its parts claim."""

from collections.abc import Iterable
from itertools import cycle, product
from typing import Any

import pytest
import torch

import residua
from residua.config.model import ModelConfig
from residua.model.decoder import Decoder
from residua.model.equivalence import InitFidelity
from residua.model.retrofit import retrofit
from residua.train.start import what_is_kept
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets
from tests.nightly import only_nightly

pytestmark = pytest.mark.slow

GATED = {"attention": {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "elementwise"}}
ANCHORS = {"resformer": {}, "nuresformer": GATED, "exoformer": GATED}

EXACT: dict[str, dict[str, Any]] = {
    "the same": {},
    "denseformer": {"topology": {"kind": "dense"}},
    "denseformer, dilated": {"topology": {"kind": "dense", "dilation": 2, "period": 2}},
    "layer factor": {"topology": {"kind": "layer_factor"}},
    "layer scale": {"topology": {"kind": "scaled"}},
    "rezero": {"topology": {"kind": "scaled", "gain": "scalar", "start": 0.0}},
    "x0, raw": {"topology": {"kind": "x0", "embedding": "raw"}},
    "x0, raw, by sublayer": {"topology": {"kind": "x0", "embedding": "raw", "scalars": "sublayer"}},
    "preaffine": {"norm": {"kind": "preaffine"}},
    "gatednorm": {"norm": {"kind": "gatednorm", "rank": 3}},
    "gatednorm, one gate": {"norm": {"kind": "gatednorm", "rank": 3, "granularity": "tensorwise"}},
    "gated attention": GATED,
    "gated attention by head": {"attention": GATED["attention"] | {"gate": "headwise"}},
    "biases": {"attention": GATED["attention"] | {"gate": "none", "bias": "all"}},
    **{name: gate | {"anchors": {"kind": name}} for name, gate in ANCHORS.items()},
    "resformer by element": {"anchors": {"kind": "resformer", "granularity": "elementwise"}},
    "exoformer, dynamic": GATED | {"anchors": {"kind": "exoformer", "mixing": {"kind": "dynamic"}}},
    "exoformer without gate": {"anchors": {"kind": "exoformer", "pathways": ["q", "k", "v"]}},
    "denseformer + exoformer + gatednorm": GATED
    | {"topology": {"kind": "dense"}, "anchors": {"kind": "exoformer"}, "norm": {"kind": "gatednorm"}},
}
UP_TO_EPS: dict[str, dict[str, Any]] = {
    "hyper-connections": {"topology": {"kind": "hyper"}},
    "hyper-connections, static": {"topology": {"kind": "hyper", "weights": "static", "streams": 3}},
    "hyper-connections, cyclic": {"topology": {"kind": "hyper", "mix": "cyclic", "streams": 3}},
    "hyper-connections, not mixed": {"topology": {"kind": "hyper", "mix": "identity", "streams": 2}},
    "hyper-connections, single pass": {"topology": {"kind": "hyper_single_pass", "streams": 2}},
    "mhc": {"topology": {"kind": "mhc"}},
    "mhc, one stream": {"topology": {"kind": "mhc", "streams": 1}},
    "mhc_lite": {"topology": {"kind": "mhc_lite", "streams": 3}},
    "full_attnres": {"topology": {"kind": "full_attnres"}},
    "full_attnres, sigmoid": {"topology": {"kind": "full_attnres", "activation": "sigmoid", "key_norm": "none"}},
    "block_attnres": {"topology": {"kind": "block_attnres", "sublayers_per_block": 2}},
    "block_attnres, uneven": {"topology": {"kind": "block_attnres", "sublayers_per_block": 4, "scale": 0.5}},
    "delta_attnres": {"topology": {"kind": "delta_attnres"}},
    "delta_attnres, blocks": {"topology": {"kind": "delta_attnres", "sublayers_per_block": 2, "scale": 0.5}},
    "mgr": {"topology": {"kind": "multi_gate", "streams": 2}},
    "mgr, four streams": {"topology": {"kind": "multi_gate", "streams": 4}},
    "mgr, independent": {"topology": {"kind": "multi_gate", "streams": 3, "gate": "independent"}},
    "highway": {"topology": {"kind": "highway"}},
    "highway by element": {"topology": {"kind": "highway", "gate": "elementwise"}},
    "mgr + exoformer + gatednorm": GATED
    | {"topology": {"kind": "multi_gate"}, "anchors": {"kind": "exoformer"}, "norm": {"kind": "gatednorm"}},
    "block_attnres + preaffine": {
        "topology": {"kind": "block_attnres", "sublayers_per_block": 2},
        "norm": {"kind": "preaffine"},
    },
}
BASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama": {"attention": {"qk_norm": "none", "window": 3}, "head": {"kind": "untied"}},
    "qwen2": {"attention": {"qk_norm": "none", "bias": "qkv"}, "ffn": {"kind": "swiglu", "hidden": 24, "bias": True}},
    "gemma": {"placement": "both", "embed_scale": 4.0, "ffn": {"kind": "geglu", "hidden": 24}},
    "mixture": {"ffn": {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2, "normalize": False, "shared": 1}},
}


def configured(base: str, changes: dict[str, Any], eps: float = 1e-6) -> ModelConfig:
    """A base with changes applied to it: attention key by key, norms with the base's eps."""
    tables = {"attention": {"kind": "softmax", "heads": 4, "kv_heads": 2}, "norm": {"kind": "rmsnorm", "eps": eps}}
    for given in (BASES[base], changes):
        merged = {**tables.get("attention", {}), **given.get("attention", {})}
        tables = {**tables, **given, "attention": merged}
    tables["norm"] = {**({} if "dyt" in tables["norm"]["kind"] else {"eps": eps}), **tables["norm"]}
    return small(**tables)


def retrofitted(
    base: str, changes: dict[str, Any], eps: float = 1e-6
) -> tuple[Decoder, Decoder, dict[str, InitFidelity]]:
    old = randomise(residua.build(configured(base, {}, eps)), 0.3)
    new = residua.build(configured(base, changes, eps)).double()
    return new, old, retrofit(new, old)


@torch.no_grad()
def difference(new: Decoder, old: Decoder) -> float:
    tokens, _ = tokens_and_targets(2, 8)
    return float((new(tokens) - old(tokens)).abs().max())


@torch.no_grad()
def largest_logit(model: Decoder) -> float:
    return float(model(tokens_and_targets(2, 8)[0]).abs().max())


def on_bases(names: Iterable[str]) -> list[Any]:
    """Every name on every base; in `make test` on the plain one and on another in turn."""
    others = cycle(base for base in BASES if base != "plain")
    kept = [(name, base) for name in names for base in ("plain", next(others))]
    return only_nightly(product(names, BASES), kept)


@pytest.mark.parametrize("case", on_bases(EXACT), ids=", ".join)
def test_exact_starts_keep_the_function(case: tuple[str, str]) -> None:
    name, base = case
    new, old, kept = retrofitted(base, EXACT[name])
    assert kept == {"model": InitFidelity.EXACTLY} and difference(new, old) < 1e-11


@pytest.mark.parametrize(
    "case", only_nightly(product(UP_TO_EPS, BASES), zip(UP_TO_EPS, cycle(BASES), strict=False)), ids=", ".join
)
def test_multiples_of_the_sum_are_exact_with_its_eps(case: tuple[str, str]) -> None:
    """The norm of each reader cancels the multiple: exactly if its eps is scaled too, else up to its eps."""
    name, base = case
    new, old, kept = retrofitted(base, UP_TO_EPS[name] | {"reader_eps": "sum"}, eps=1e-3)
    assert kept == {"model": InitFidelity.EXACTLY} and difference(new, old) < 1e-11
    new, old, _ = retrofitted(base, UP_TO_EPS[name] | {"reader_eps": "sum"}, eps=1e-5)
    assert difference(new.float(), old.float()) < 1e-5 * largest_logit(old)
    new, old, kept = retrofitted(base, UP_TO_EPS[name], eps=1e-3)
    assert kept["model"] is InitFidelity.UP_TO_EPS and difference(new, old) > 1e-9
    new, old, _ = retrofitted(base, UP_TO_EPS[name], eps=1e-16)
    assert difference(new, old) < 1e-10


def test_a_new_sink_has_almost_no_effect_and_can_be_learned() -> None:
    new, old, kept = retrofitted("plain", {"attention": {"sink": "learned"}})
    assert kept["model"] is InitFidelity.NEARLY and 0 < difference(new, old) < 1e-3
    tokens, targets = tokens_and_targets()
    new.loss(tokens, targets).backward()
    assert all(sublayer.body.sink.grad.abs().max() > 0 for sublayer in new.sublayers[::2])


NOT: dict[str, dict[str, Any]] = {
    "dyt": {"norm": {"kind": "dyt"}},
    "gatednorm, tanh": {"norm": {"kind": "gatednorm", "activation": "tanh"}},
    "full_attnres, window": {"topology": {"kind": "full_attnres", "window": 1}},
    "boundary_attnres": {"topology": {"kind": "boundary_attnres", "sublayers_per_block": 2}},
    "mgr, dyt": {"topology": {"kind": "multi_gate", "streams": 2}, "norm": {"kind": "dyt"}},
}


@pytest.mark.parametrize("name", NOT)
def test_changed_functions_are_not_claimed_to_be_kept(name: str) -> None:
    new, old, kept = retrofitted("plain", NOT[name])
    assert kept["model"] is InitFidelity.NOT and difference(new, old) > 1e-3


@pytest.mark.parametrize(
    ("kind", "claimed"),
    [
        ({"kind": "dense"}, InitFidelity.EXACTLY),
        ({"kind": "hyper"}, InitFidelity.EXACTLY),
        ({"kind": "mhc"}, InitFidelity.EXACTLY),
        ({"kind": "mhc_lite", "streams": 3}, InitFidelity.EXACTLY),
        ({"kind": "mhc", "streams": 1}, InitFidelity.NOT),
        ({"kind": "multi_gate"}, InitFidelity.NOT),
    ],
    ids=str,
)
def test_normed_outputs_require_readers_of_the_plain_sum(kind: dict[str, Any], claimed: InitFidelity) -> None:
    """Only the head of OLMo 2 is preceded by a norm that cancels a multiple."""
    old = randomise(residua.build(configured("plain", {"placement": "output"}, eps=1e-3)), 0.3)
    tables = {"placement": "output", "topology": kind, "reader_eps": "sum"}
    new = residua.build(configured("plain", tables, eps=1e-3)).double()
    assert retrofit(new, old)["model"] is claimed
    assert (difference(new, old) < 1e-11) == (claimed is InitFidelity.EXACTLY)


def test_clipping_is_exact_below_its_limit() -> None:
    new, old, kept = retrofitted("plain", {"topology": {"kind": "clipped"}})
    assert kept["topology.kind"] is InitFidelity.NEARLY and difference(new, old) < 1e-11


def test_a_model_of_the_same_shape_takes_all_weights() -> None:
    """Also the parameters of its topology, anchors and gates."""
    tables = EXACT["exoformer, dynamic"] | {"topology": {"kind": "multi_gate"}}
    old = randomise(residua.build(configured("plain", tables)), 0.3)
    new = residua.build(configured("plain", tables)).double()
    assert retrofit(new, old) == {"model": InitFidelity.EXACTLY} and difference(new, old) == 0.0
    untied = residua.build(configured("plain", tables | {"head": {"kind": "untied"}})).double()
    assert retrofit(untied, old) == {"model": InitFidelity.EXACTLY} and difference(untied, old) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 32}, r"model.width = 32 \(it was 16\) does not fit the initial weights"),
        ({"ffn": {"kind": "swiglu", "hidden": 32}}, "model.ffn does not fit the initial weights"),
        ({"attention": {"heads": 2}}, "attention.heads, kv_heads or head_dim differ"),
        ({"placement": "output"}, r"model.placement = 'output' \(it was 'input'\) does not"),
    ],
    ids=str,
)
def test_mismatched_weights_are_refused(changes: dict[str, Any], message: str) -> None:
    old = residua.build(configured("plain", {}))
    with pytest.raises(ValueError, match=message):
        retrofit(residua.build(configured("plain", changes)), old)


def test_a_changed_reader_eps_is_reported() -> None:
    tables = {"topology": {"kind": "highway"}}
    old = randomise(residua.build(configured("plain", tables | {"reader_eps": "sum"})), 0.3)
    new = residua.build(configured("plain", tables)).double()
    assert retrofit(new, old)["reader_eps"] is InitFidelity.UP_TO_EPS
    new, old, kept = retrofitted("plain", {"norm": {"kind": "rmsnorm", "eps": 1e-3}})
    assert kept == {"norm.eps": InitFidelity.UP_TO_EPS, "model": InitFidelity.UP_TO_EPS}


def test_only_an_additive_model_can_change_its_topology() -> None:
    old = residua.build(configured("plain", {"topology": {"kind": "highway"}}))
    with pytest.raises(ValueError, match="'highway', but only an additive"):
        retrofit(residua.build(configured("plain", {"topology": {"kind": "dense"}})), old)


def test_new_parameters_learn_from_the_first_steps_on() -> None:
    """A start at which gradients vanish would keep the function forever."""
    tokens, targets = tokens_and_targets()
    for tables in (UP_TO_EPS["mgr + exoformer + gatednorm"], UP_TO_EPS["mhc"], EXACT["denseformer"]):
        new, _, _ = retrofitted("plain", tables)
        before = {name: parameter.detach().clone() for name, parameter in new.named_parameters()}
        optimizer = torch.optim.SGD(new.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            new.loss(tokens, targets).backward()
            optimizer.step()
        still = [name for name, parameter in new.named_parameters() if torch.equal(parameter, before[name])]
        assert not still


def test_values_tied_to_keys_become_separate_values() -> None:
    tables = {"attention": {"values": "keys"}}
    old = randomise(residua.build(configured("plain", tables)), 0.3)
    new, again = (residua.build(configured("plain", keys)).double() for keys in ({}, tables))
    assert retrofit(new, old) == {"model": InitFidelity.EXACTLY} and difference(new, old) < 1e-11
    assert retrofit(again, new)["attention.values"] is InitFidelity.NOT


@pytest.mark.parametrize(
    "topology", [{"kind": "additive"}, {"kind": "block_attnres", "sublayers_per_block": 2}], ids=str
)
def test_layer_factors_fold_into_output_norms(topology: dict[str, Any]) -> None:
    factors = {"topology": {"kind": "layer_factor"}}

    def started(base: str, eps: float, sign: float = 1.0) -> tuple[float, InitFidelity]:
        old = randomise(residua.build(configured(base, factors, eps)), 0.3)
        old.topology.factor.data.mul_(sign)
        new = residua.build(configured(base, {"topology": topology}, eps)).double()
        kept = retrofit(new, old)["model"]
        return difference(new, old), kept

    assert started("gemma", 1e-16)[0] < 1e-10 and started("gemma", 1e-3)[0] > 1e-9
    assert started("gemma", 1e-3)[1] is InitFidelity.UP_TO_EPS
    with pytest.warns(UserWarning, match="a layer factor of the initial model is not positive"):
        assert started("plain", 1e-3)[1] is started("gemma", 1e-3, -1.0)[1] is InitFidelity.NOT
    before, after = (configured("gemma", tables, 1e-3) for tables in (factors, {"topology": topology}))
    assert what_is_kept(after, before)["model"] is InitFidelity.UP_TO_EPS  # as residua train prints it
