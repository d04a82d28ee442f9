"""Impossible models: each is refused in a sentence that names the keys."""

from typing import Any

import pytest

from residua.config.settings import ConfigError
from tests.model.combinations import ATTENTIONS, LATENT, LINEAR
from tests.model.small import small
from tests.model.test_decoding import LOOP, SOFTMAX
from tests.model.test_hybrid import hybrid

KIMI = ATTENTIONS["hybrid kimi"]
MOE = {"kind": "moe", "hidden": 8, "experts": 5, "top_k": 2}
LONG = {"kind": "longrope", "short": [1.0, 2.0], "long": [3.0, 4.0], "original_context": 4}
LLAMA = {"kind": "llama3", "factor": 2.0, "original_context": 4, "high": 1.0}
RESFORMER = {"kind": "resformer"}
CLA = {"kind": "cla"}
TWICE = {"kind": "listed", "layers": [0, 1, 1, 2]}
TWO_BASES = {"kind": "softmax", "heads": 2, "window": 2, "local_rope_theta": 5.0}
INJECTED = {"kind": "injection", "prelude": 1, "loop": 1, "turns": 2}


IMPOSSIBLE_ATTENTIONS: list[tuple[dict[str, Any], str]] = [
    (SOFTMAX | {"window_layers": [0]}, "attention.window_layers needs attention.window"),
    (SOFTMAX | {"window": 2, "window_layers": [3]}, "attention.window_layers contains 3, but layers = 3"),
    (SOFTMAX | {"rope_scaling": LONG | {"short": [1.0], "long": [1.0]}}, "heads of width 4 have 2 pairs"),
    (SOFTMAX | {"rope_scaling": LONG | {"short": [1.0]}}, "has 1 factors and"),
    (SOFTMAX | {"rope_scaling": LLAMA}, "must be more than"),
    (SOFTMAX | {"rope_scaling": {"kind": "yarm"}}, "did you mean 'yarn'?"),
    (hybrid(every=4), "attention.softmax_every = 4 leaves none of layers = 3 with softmax"),
    (hybrid(every=1), "attention.softmax_every = 1"),
    (hybrid(heads=3), "attention.softmax.heads = 3 does not divide width = 16"),
    (hybrid(kv_heads=3), "attention.softmax.kv_heads = 3 does not divide attention.softmax.heads = 2"),
    (hybrid() | {"linear": LINEAR | {"key_heads": 3}}, "attention.linear.key_heads = 3"),
    ({"kind": "hybrid", "softmax": {"heads": 2}}, "attention.linear is missing"),
    (LATENT | {"shared_dim": 0}, "attention.shared_dim = 0"),
    (LATENT | {"shared_dim": 3}, "attention.shared_dim = 3"),
    (KIMI | {"softmax_layers": [3]}, "attention.softmax_layers = [3] must contain one or more of"),
    (KIMI | {"softmax_layers": []}, "attention.softmax_layers = [] must contain"),
    (KIMI | {"linear": {"kind": "kimi_delta"}}, "attention.linear.heads is missing"),
    (KIMI | {"softmax": {"kind": "mlp", "heads": 2}}, "did you mean 'mla'"),
]
EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 6}, "ffn.top_k = 6 is more than ffn.experts = 5"),
    ({"shared": 0, "shared_gate": "sigmoid"}, "ffn.shared_gate = 'sigmoid'"),
    ({"activation": "swigl"}, "did you mean 'swiglu'"),
    ({"dense_layers": 3}, "ffn.dense_layers = 3 leaves no expert layers among layers = 3"),
    ({"dense_hidden": 3}, "ffn.dense_hidden = 3 is the width of dense layers"),
    ({"router": {"kind": "sigmoid_scores", "scale": 0}}, "ffn.router"),
    ({"router": {"kind": "sigmoid_scores", "groups": 4}}, "ffn.router.groups = 4 does not divide ffn.experts = 5"),
    ({"experts": 8, "router": {"groups": 4, "kind": "softmax_scores"}, "top_k": 3}, "ffn.router.top_groups = 1 must"),
    ({"router": {"kind": "sigmoid_score"}}, "did you mean 'sigmoid_scores'"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"attention": KIMI, "anchors": RESFORMER}, "latent attention ('mla') has none"),
    ({"attention": hybrid(), "anchors": {"kind": "exoformer"}}, "attention.softmax.gate = 'none'"),
    (
        {"attention": SOFTMAX | {"qk_norm": "rms_all"}, "anchors": RESFORMER},
        "normalizes them together.* changes what a trained model computes",
    ),
    ({"attention": SOFTMAX | {"values": "keys"}, "anchors": RESFORMER}, "attention.values gives some layers different"),
    ({"attention": SOFTMAX | {"qk_norm": "rms_qkv"}, "anchors": RESFORMER}, "attention.qk_norm = 'rms_qkv'"),
    ({"attention": SOFTMAX | {"full": {"kv_heads": 1}}}, "attention.full needs attention.window"),
    ({"attention": SOFTMAX | {"window": 2, "full": {"head_dim": 4}}}, "attention.full.head_dim = 4 needs rotary"),
    (
        {"attention": SOFTMAX | {"window": 2, "local_rope_theta": 9.0, "full": {"head_dim": 5}}},
        "attention.full.head_dim = 5 is odd",
    ),
    (
        {"attention": SOFTMAX | {"qk_norm": "dyt"}, "anchors": RESFORMER},
        "attention.qk_norm = 'dyt': use anchors.kind = 'none' or qk_norm = 'rms'",
    ),
    (
        {"topology": {"kind": "multi_gate", "streams": 4, "base_depth": 400, "base_bias": -1.0}},
        "ln(sqrt(L/400)(e^1+1) - n) has no solution",
    ),
    (
        {"topology": {"kind": "boundary_attnres", "sublayers_per_block": 7}},
        "topology.sublayers_per_block = 7 is more than the model's 6 sublayers",
    ),
    ({"topology": {"kind": "gated_residual"}, "norm": {"kind": "dyt"}}, "normalizes the inputs of the sublayers and"),
    ({"topology": {"kind": "mudd", "ways": []}}, "must contain one or more"),
    ({"topology": {"kind": "mudd", "layers": [4]}}, "layer 4, but the model has"),
    ({"anchors": {"kind": "value_embeddings", "gate_channels": 17}}, "gate_channels = 17 is more than width = 16"),
    ({"anchors": {"kind": "kv_source", "layer": 3}}, "not one of the 3 softmax layers: use 0 to 2"),
    ({"anchors": CLA, "topology": {"kind": "mudd"}}, "'mudd' gives keys and values separate inputs"),
    ({"anchors": CLA, "order": TWICE}, "order.kind = 'listed'"),
    ({"anchors": {"kind": "lime"}, "order": TWICE}, "'lime' refers to keys and values by their layer"),
    ({"anchors": {"kind": "depth_attention"}, "order": LOOP}, "order.kind = 'loop'"),
    ({"anchors": CLA, "attention": TWO_BASES}, "shares keys after their rotation"),
    ({"order": LOOP | {"prelude": 2}}, "leave no layers to loop"),
    ({"order": {"kind": "listed", "layers": [0, 1]}}, "leaves out layer 2"),
    ({"order": {"kind": "listed", "layers": [0, 1, 2, 3]}}, "names layer 3"),
    ({"order": LOOP, "ffn": MOE}, "ffn.kind = 'moe'"),
    ({"order": LOOP, "reader_eps": "sum"}, "reader_eps"),
    ({"topology": INJECTED, "order": {"kind": "sequential"}}, "set order={kind='loop', prelude=1, coda=1"),
    ({"topology": INJECTED, "order": LOOP | {"turns": 3}}, "turns = 2, which is not"),
]
CASES = [
    *(({"attention": table}, words) for table, words in IMPOSSIBLE_ATTENTIONS),
    *(({"ffn": MOE | changes}, words) for changes, words in EXPERTS),
    *OTHERS,
]


@pytest.mark.parametrize(("tables", "words"), CASES, ids=[words for _, words in CASES])
def test_an_impossible_model_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        small(**tables)
    for part in words.split(".*"):
        assert part in str(refusal.value)
