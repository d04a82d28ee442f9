"""Keys and values of other layers: shared ones (CLA, one source, SVFormer), mixtures of all (LIMe, Depth-Attention)."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import residua
from residua.config import choices
from residua.model.cache import BorrowedCache
from residua.model.size import measure
from residua.quantize.smoothing import edges
from tests.golden import attention as golden
from tests.golden.compare import close
from tests.model.small import small, tokens_and_targets
from tests.model.test_attention import THETA, attention_config, check_layers, rest_of_layer
from tests.model.test_decoding import SHARED

IDENTITY = {"kind": "lime", "start": "identity"}
LENDERS = {"cla": [0, 0, 2, 2], "source": [0, 1, 1, 1], "svformer": [0, 0, 0, 0]}


@pytest.mark.parametrize("options", [{}, {"gate": "headwise", "qk_norm": "none"}], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_shared_heads_match_their_equation(name: str, options: dict) -> None:
    anchors = choices.AnchorChoice.choose(SHARED[name])

    def equation(layers: Any, own: list[golden.Projections], x: list[Tensor], b: int) -> Iterator[Tensor]:
        for at, (layer, lender) in enumerate(zip(layers, LENDERS[name], strict=True)):
            heads = own[at] | {s: own[lender][s] for s in anchors.mixed}
            gains = dict(layers[lender if "k" in anchors.mixed else at].qk_norm.named_parameters())
            query = dict(layer.qk_norm.named_parameters()).get("query")
            yield golden.attention(
                heads, layer.out.weight, theta=THETA, q_gain=query, k_gain=gains.get("key"), eps=layer.qk_norm.eps
            )

    check_layers(attention_config(kv_heads=2, **options), anchors, 4, equation)


@pytest.mark.parametrize("anchors", [{"kind": "cla", "group": 1}, {"kind": "kv_source", "layer": 2}], ids=str)
def test_layers_that_share_nothing_equal_the_plain_model(anchors: dict) -> None:
    torch.manual_seed(0)
    plain = residua.build(small())
    torch.manual_seed(0)
    assert torch.equal(residua.build(small(anchors=anchors))(tokens_and_targets()[0]), plain(tokens_and_targets()[0]))


@pytest.mark.parametrize("name", SHARED)
def test_layers_with_shared_heads_have_no_parameters_or_cache(name: str) -> None:
    plain, config = small(layers=4), small(layers=4, anchors=SHARED[name])
    taken = sum(len(pathways) for _, pathways in config.borrowed.values())
    model, fewer = residua.build(config), taken * 16 * 16
    gains = 8 * sum("k" in pathways for _, pathways in config.borrowed.values())
    before, after = measure(plain), measure(config)
    assert before.attention - after.attention == fewer + gains
    assert before.flops_per_token - after.flops_per_token == 6 * (fewer + gains)
    caches = model.new_cache(2, 5)
    assert sum(t.numel() for t in caches.tensors()) == (8 - taken) * 2 * 5 * 16
    for layer, lender in enumerate(LENDERS[name]):
        assert isinstance(caches.sublayers[2 * layer], BorrowedCache) == (layer != lender)
        assert caches.sublayers[2 * layer].values is caches.sublayers[2 * lender].values


def test_shared_values_are_not_smoothed() -> None:
    model = residua.build(small(layers=4, anchors={"kind": "kv_source", "layer": 1}))
    assert [edge.name for edge in edges(model) if edge.name.endswith("values")] == ["sublayers.0.body.values"]


@pytest.mark.parametrize("options", [{}, {"gate": "elementwise", "qk_norm": "rms_all"}], ids=str)
def test_mixtures_over_all_layers_match_their_equation(options: dict) -> None:
    def equation(layers: Any, own: list[golden.Projections], x: list[Tensor], b: int) -> Iterator[Tensor]:
        for at, layer in enumerate(layers):
            so_far = {s: [every[s] for every in own[: at + 1]] for s in "kv" if at}
            routed = {s: golden.route_heads(heads, layer.mix.router) for s, heads in so_far.items()}
            yield rest_of_layer(layer, own[at] | routed, None)

    check_layers(attention_config(kv_heads=2, **options), choices.Lime(), 3, equation)


def test_mixtures_starting_as_identity_equal_the_plain_model() -> None:
    plain, mixed = (residua.build(small(**tables)).double() for tables in ({}, {"anchors": IDENTITY}))
    mixed.load_state_dict(plain.state_dict(), strict=False)
    close("logits", mixed(tokens_and_targets()[0]), plain(tokens_and_targets()[0]), 1e-12)
    assert choices.Lime().carried(2) == choices.DepthAttention().carried(2) == ("k", "v", "k", "v")


@pytest.mark.parametrize("norm", ["rms", "none"])
def test_values_attended_over_layers_match_their_equation(norm: str) -> None:
    def equation(layers: Any, own: list[golden.Projections], x: list[Tensor], b: int) -> Iterator[Tensor]:
        keys, values = [], []
        for layer, S in zip(layers, own, strict=True):
            gains = dict(layer.qk_norm.named_parameters())  # rotating both by one position changes no product
            names = {"q": "query", "k": "key"}
            q, k = (golden.normed(S[s], gains.get(name), layer.qk_norm.eps) for s, name in names.items())
            keys.append(k)
            values.append(golden.attend_layers(q, keys, [*values, S["v"]]))
            yield rest_of_layer(layer, S | {"v": values[-1]}, None)

    check_layers(attention_config(kv_heads=2, gate="headwise", qk_norm=norm), choices.DepthAttention(), 3, equation)
