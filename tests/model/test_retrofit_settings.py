"""Retrofits by one changed setting: claims about the function are true.

The settings are read from the configuration's classes, so a new one is tested too, both ways: from its usual value to
every other, and back.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import permutations
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

import residua
from residua.config import choices
from residua.config.model import ModelConfig
from residua.config.settings import ConfigError, Frozen
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.equivalence import InitFidelity
from residua.model.norm import Norm
from residua.model.retrofit import retrofit
from tests.golden.compare import randomise
from tests.model.small import small, tokens_and_targets

pytestmark = pytest.mark.slow

SOFTMAX = {"kind": "softmax", "heads": 2, "kv_heads": 1, "head_dim": 4, "window": 4}
GATED = SOFTMAX | {"gate": "elementwise"}
BASE: dict[str, Any] = {"layers": 2, "width": 8, "ffn": {"kind": "gelu", "hidden": 4}, "attention": SOFTMAX}

Table = dict[str, Any]


def table(choice: type[Frozen], **keys: Any) -> Table:
    """A small table of a kind, in which no setting is without effect."""
    usual = {
        "sublayers_per_block": 2,
        "limit": 0.5,
        "streams": 2,
        "fractions": 2,
        "rank": 3,
        "iterations": 2,
        "gate_channels": 4,
    }
    return {key: usual[key] for key in choice.model_fields if key in usual} | {"kind": kind_of(choice)} | keys


def kind_of(choice: type[Frozen]) -> str:
    return str(choice.model_fields["kind"].default)


def ours(family: Any) -> list[type[Frozen]]:
    """The kinds that come with Residua."""
    found = [choice for choice in family.alternatives() if choice.__module__.startswith("residua.")]
    return [choice for choice in found if choice is not choices.Injection]  # it needs an order, which no start changes


ANCHORS = ours(choices.AnchorChoice)
DYNAMIC = {"mixing": {"kind": "dynamic", "hidden": 3}}
SETTINGS: list[Any] = [
    *(("topology", {"topology": table(choice)}) for choice in ours(choices.TopologyChoice)),
    *(("norm", {"norm": table(choice)}) for choice in ours(choices.NormChoice)),
    *(("anchors", {"anchors": table(choice), "attention": GATED}) for choice in ANCHORS),
    ("attention", {}),
]
"""Every kind of topology, norm and anchors, and softmax attention, with its required settings."""
MORE: list[Any] = [
    ("topology", {"topology": table(choices.FullAttnRes, window=1)}, "window"),
    ("anchors", {"anchors": table(choices.NuResFormer, **DYNAMIC), "attention": GATED}, "mixing"),
    ("anchors", {"anchors": table(choices.ExoFormer, **DYNAMIC), "attention": GATED}, "pathways"),
    ("anchors", {"anchors": table(choices.ExoFormer, pathways=("v",), norm="qk")}, "norm"),
    ("attention", {"attention": GATED}, "gate"),
    ("attention", {"attention": SOFTMAX | {"qk_norm": "dyt"}}, "qk_eps"),
]
"""Settings whose meaning depends on other settings."""
REFUSED = {
    *(f"{kind}_attnres.key_norm" for kind in ("full", "block", "boundary", "delta")),
    "boundary_attnres.sublayers_per_block",
    *(f"{kind}.streams" for kind in ("multi_gate", "gated_residual", "hyper", "hyper_single_pass", "mhc", "mhc_lite")),
    *("gated_residual.rank", "laurel.rank", "frac.fractions", "frac.weights"),
    *(f"additive.kind = {kind_of(choice)}" for choice in ours(choices.TopologyChoice) if choice.norms_inputs),
    *(f"{kind}.gate" for kind in ("multi_gate", "highway", "softmax")),
    "hyper.weights",
    *(f"{kind}.mix" for kind in ("hyper", "hyper_single_pass")),
    "x0.scalars",
    "scaled.gain",
    *(f"mudd.{key}" for key in ("ways", "layers", "sources")),
    "dca.recent",
    *(f"{kind}.{key}" for kind in ("gatednorm", "gated_dyt") for key in ("rank", "granularity")),
    *(f"{kind}.granularity" for kind in ("resformer", "nuresformer", "exoformer")),
    "nuresformer.mixing",
    *(f"softmax.{key}" for key in ("heads", "kv_heads")),
    *(f"{choice}.kind" for choice in map(kind_of, ours(choices.TopologyChoice)) if choice != "additive"),
    *(
        f"{kind}.kind"
        for kind in (
            "resformer",
            "nuresformer",
            "exoformer",
            "gated_value",
            "value_embeddings",
            "lime",
            "depth_attention",
        )
    ),
    "value_embeddings.gate_channels",
    *(f"{kind}.{key}" for kind in ("cla", "kv_source") for key in ("kind", "shared", "group", "layer")),
}
"""Settings for which the weights of another value do not fit."""


def values(annotation: Any, now: Any) -> Iterator[Any]:
    """Other values of a setting, by its type; some may not fit the model."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from values(arguments[0], now)
    elif origin is Literal:
        yield from (value for value in arguments if value != now)
    elif NoneType in arguments:
        (kind,) = (kind for kind in arguments if kind is not NoneType)
        yield from () if now is None else [None]
        yield from values(kind, now)
    elif origin is tuple and get_origin(arguments[0]) is Literal:
        yield from (now[:-1], now[::-1]) if len(now) > 1 else ()
    elif origin is tuple:
        yield (1,) if now is None else tuple(value / 2 for value in now)
    elif annotation is int:
        yield from [2] if now is None else (now + 1, now - 1)
    elif annotation is float:
        yield 2.0 if now is None else 2 * now
    elif arguments or issubclass(annotation, Frozen):  # a table, or one of several
        for choice in arguments or (annotation,):
            if now is None or ("kind" in now and kind_of(choice) != now["kind"]):
                yield optional_keys(choice)
            else:
                for key, value in changes(choice, now):
                    yield now | {key: value}
    else:
        raise AssertionError(f"how is a setting of type {annotation} changed?")


def optional_keys(choice: type[Frozen]) -> Table:
    """The table of a kind, with a number for every required key."""
    needed = {key: 2 for key, field in choice.model_fields.items() if field.is_required()}
    return needed if "kind" not in choice.model_fields else needed | {"kind": kind_of(choice)}


def changes(choice: type[Frozen], now: Table) -> Iterator[tuple[str, Any]]:
    """Every setting of a table with every other value."""
    for key, field in choice.model_fields.items():
        if key != "kind":
            value = now[key] if key in now else choice.model_validate(now).model_dump()[key]
            for other in values(field.annotation, value):
                yield key, other


def configured(keys: Table) -> ModelConfig:
    return small(**(BASE | keys))


def fitting(keys: Table) -> ModelConfig | None:
    try:
        return configured(keys)
    except ConfigError:
        return None  # refused whether it is a retrofit or not


def one_setting_changed(
    name: str, keys: Table, only: str | None = None
) -> Iterator[tuple[str, ModelConfig, ModelConfig]]:
    """Models that differ in one setting of the table `name`, both ways."""
    base = configured(keys)
    now = getattr(base, name)
    tried: dict[str, bool] = {}
    for key, value in changes(type(now), now.model_dump()):
        if only in (None, key):
            other = fitting(keys | {name: now.model_dump() | {key: value}})
            tried[key] = tried.get(key, False) or other is not None
            if other is not None:
                yield f"{now.kind}.{key} = {value}", base, other
                yield f"{now.kind}.{key} = {value} before", other, base
    assert all(tried.values()), f"no other value of some of these fits the model: {tried}"


def kind_changed(name: str) -> Iterator[tuple[str, ModelConfig, ModelConfig]]:
    """Models of different kinds; of topologies only from and to the sum, since others are refused equally."""
    tables = [keys for table, keys in SETTINGS if table == name]
    for before, after in permutations(tables, 2):
        kinds = [keys[name]["kind"] for keys in (before, after)]
        if name != "topology" or "additive" in kinds:
            yield f"{kinds[0]}.kind = {kinds[1]}", configured(before), configured(after)


@cache
def trained(config: ModelConfig) -> tuple[Decoder, Tensor]:
    """A model whose parameters are all away from their start, and its logits."""
    torch.manual_seed(0)
    model = randomise(residua.build(config), 0.3)
    assert isinstance(model, Decoder)
    return model, logits(model)


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    return model(tokens_and_targets(1, 6)[0])


def mistake(change: str, before: ModelConfig, after: ModelConfig) -> str | None:
    """How the claim of a retrofit differs from its outputs; None if it does not, or if it is refused as it should."""
    old, expected = trained(before)
    new = residua.build(after).double()
    try:
        claim = retrofit(new, old)["model"]
    except UserError as refusal:
        return None if {change, change.partition(" ")[0]} & REFUSED else f"refused: {refusal}"
    off = float((logits(new) - expected).abs().max())
    limits = {
        InitFidelity.EXACTLY: (0.0, 1e-11),
        InitFidelity.UP_TO_EPS: (1e-11, 1e-2),
        InitFidelity.NEARLY: (1e-11, math.inf),
        InitFidelity.NOT: (1e-11, math.inf),
    }
    low, high = limits[claim]
    return None if low <= off < high else f"kept {claim.words}, and the logits differ by {off:.1e}"


def mistakes(cases: Iterable[tuple[str, ModelConfig, ModelConfig]]) -> dict[str, str]:
    return {change: wrong for change, before, after in cases if (wrong := mistake(change, before, after))}


def label(case: Any) -> str:
    name, keys, *only = case
    return " ".join([keys.get(name, {}).get("kind", name), *only])


@pytest.mark.parametrize("case", [*SETTINGS, *MORE], ids=label)
def test_retrofit_claims_hold_when_one_setting_changes(case: tuple[str, Table]) -> None:
    assert not mistakes(one_setting_changed(*case))


@pytest.mark.parametrize("name", ["topology", "norm", "anchors"])
def test_retrofit_claims_hold_when_the_kind_changes(name: str) -> None:
    assert not mistakes(kind_changed(name))


@pytest.mark.parametrize(("norm", "claim"), [("none", InitFidelity.EXACTLY), ("all", InitFidelity.NOT)])
def test_value_residuals_become_raw_anchors_exactly(norm: str, claim: InitFidelity) -> None:
    before, after = (
        {"anchors": anchors, "attention": GATED}
        for anchors in ({"kind": "resformer"}, {"kind": "nuresformer", "norm": norm})
    )
    assert not mistakes([("resformer.", configured(before), configured(after))])
    assert retrofit(residua.build(configured(after)), trained(configured(before))[0])["model"] is claim


def test_mismatched_weights_error_names_the_settings() -> None:
    before, after = (
        configured({"topology": {"kind": "hyper", "streams": n, "weights": w}})
        for n, w in ((2, "static"), (3, "dynamic"))
    )
    with pytest.raises(UserError) as refusal:
        retrofit(residua.build(after), residua.build(before))
    assert str(refusal.value) == (
        "model.topology.streams = 3 (it was 2) and model.topology.weights = 'dynamic' (it was 'static') do not fit the "
        "initial weights: keep their values."
    )


def test_plugin_settings_are_kept_only_if_declared() -> None:
    class Mine(Norm):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(size))

    new, old = Mine(4), Mine(4)
    assert new.begin_as(old) is InitFidelity.NOT and torch.equal(new.weight, old.weight)
    with pytest.raises(UserError, match="weight of Mine does not fit"):
        new.begin_as(Mine(5))
