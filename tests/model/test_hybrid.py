"""Hybrids: which layer mixes how, where the anchors come from, decoding with both kinds of cache."""

from typing import Any

import pytest
import torch

from residua.model import taps
from residua.model.anchors import Mix, Write
from residua.model.attention import SoftmaxAttention
from residua.model.cache import KeyValueCache, RecurrentCache
from residua.model.decoder import Decoder, build
from residua.model.linear_attention import GatedDeltaNet
from residua.model.size import measure
from tests.golden.compare import close, randomise
from tests.model.combinations import LINEAR
from tests.model.small import in_parts, small, tokens_and_targets

MOE = {"kind": "moe", "hidden": 8, "experts": 4, "top_k": 2}


def hybrid(every: int = 2, **options: Any) -> dict[str, Any]:
    return {"kind": "hybrid", "softmax_every": every, "softmax": {"heads": 2} | options, "linear": LINEAR}


def mixers(model: Decoder) -> list[Any]:
    return [sublayer.body for sublayer in model.sublayers][::2]


def test_every_nth_layer_is_softmax() -> None:
    config = small(layers=8, attention=hybrid(every=4))
    assert config.softmax_layers == (3, 7)
    kinds = [type(body) for body in mixers(build(config))]
    assert kinds == [GatedDeltaNet] * 3 + [SoftmaxAttention] + [GatedDeltaNet] * 3 + [SoftmaxAttention]


def test_first_softmax_layer_writes_anchors_others_mix_them() -> None:
    anchors = {"kind": "nuresformer", "pathways": ["q", "k", "v"]}
    bodies = mixers(build(small(layers=6, attention=hybrid(), anchors=anchors)))
    assert [type(body.anchor_mix()) for body in bodies[1::2]] == [Write, Mix, Mix]
    assert not any(body.anchor_mix() for body in bodies[::2])


def test_first_softmax_layers_values_become_the_anchors() -> None:
    """With λ1 = 1 and λ2 = 0 a later layer's values are the first softmax layer's, regardless of its own."""
    model = build(small(layers=4, attention=hybrid(), anchors={"kind": "resformer"}))
    later = mixers(model)[3].mix
    with torch.no_grad():
        later.anchor_scale["v"].fill_(1.0)
        later.current_scale["v"].fill_(0.0)
    with taps.record() as seen, torch.no_grad():
        model(tokens_and_targets()[0])
    torch.testing.assert_close(seen["attention.3.value"], seen["attention.1.value"])
    assert "attention.0.value" not in seen


def test_exoformer_anchors_have_the_softmax_layers_shape() -> None:
    anchors = {"kind": "exoformer"}
    model = build(small(layers=4, attention=hybrid(heads=4, kv_heads=2, gate="elementwise"), anchors=anchors))
    opened = model.anchors.open(torch.randn(1, 3, 16))
    assert [tuple(a.shape) for a in opened] == [(1, 3, 4, 4), (1, 3, 2, 4), (1, 3, 2, 4), (1, 3, 4, 4)]


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("anchors", ["none", "resformer"])
def test_decoding_with_both_caches_equals_the_full_forward(ffn: str, anchors: str) -> None:
    tables = {"ffn": MOE} if ffn == "moe" else {}
    config = small(layers=4, attention=hybrid(), anchors={"kind": anchors}, **tables)
    model = randomise(build(config), 0.05)
    tokens = torch.randint(23, (2, 70))
    kinds = [type(part) for part in model.new_cache(2, 80).sublayers[::2]]
    assert kinds == [RecurrentCache, KeyValueCache] * 2
    close("logits", in_parts(model, tokens, [66, 1, 1, 2]), model(tokens), tolerance=1e-6)


def test_only_softmax_caches_and_flops_grow_with_context() -> None:
    def flops(every: int, context: int) -> int:
        return measure(small(layers=8, context=context, attention=hybrid(every))).flops_per_token

    assert flops(4, 108) - flops(4, 8) == 6 * 2 * 16 * 100
    assert flops(2, 108) - flops(2, 8) == 6 * 4 * 16 * 100
