"""Decoding one or a few tokens at a time equals one pass, for each part that keeps a cache."""

from typing import Any

import pytest
import torch

import residua
from residua.model.inference import InferenceDecoder
from tests.golden.compare import close, randomise
from tests.model.depth import SMALL
from tests.model.small import small, tokens_and_targets

SOFTMAX = {"kind": "softmax", "heads": 4, "kv_heads": 2}
GATED = {"kind": "softmax", "heads": 2, "gate": "elementwise"}
YARN = {"kind": "yarn", "factor": 4.0, "original_context": 4, "attention_factor": 1.1}
LOOP = {"kind": "loop", "prelude": 1, "coda": 1, "turns": 2}
FIRST_VALUES = {"anchors": {"kind": "resformer"}}
TOPOLOGIES = {name: topology.model_dump(exclude_none=True) for name, topology in SMALL.items()}
SHARED: dict[str, Any] = {
    "cla": {"kind": "cla"},
    "source": {"kind": "kv_source", "layer": 1},
    "svformer": {"kind": "kv_source", "shared": "v"},
}

MODELS: dict[str, dict[str, Any]] = {
    "window": {"attention": SOFTMAX | {"window": 3}},
    "window in one layer": {"attention": SOFTMAX | {"window": 2, "window_layers": [1], "local_rope_theta": 100.0}},
    "biases": {"attention": SOFTMAX | {"bias": "all"}, "ffn": {"kind": "swiglu", "hidden": 24, "bias": True}},
    "joint QK-norm on outputs": {"attention": SOFTMAX | {"qk_norm": "rms_all"}, "placement": "output"},
    "DyT as QK-norm": {"attention": {"kind": "softmax", "heads": 2, "qk_norm": "dyt"}},
    "both norms, GeGLU": {"placement": "both", "ffn": {"kind": "geglu", "hidden": 24}, "embed_scale": 4.0},
    "no positions in one layer": {"attention": SOFTMAX | {"unturned_layers": [1]}},
    "heads that turn in part": {"attention": SOFTMAX | {"rope_scaling": {"kind": "partial", "share": 0.5}}},
    "yarn": {"attention": SOFTMAX | {"rope_scaling": YARN}},
    "linear": {"attention": SOFTMAX | {"rope_scaling": {"kind": "linear", "factor": 2.0}, "qk_eps": 0.1}},
}
MODELS |= {
    f"loop, {name}": {"order": LOOP, "topology": TOPOLOGIES[name], **FIRST_VALUES}
    for name in ("additive", "multi_gate", "mudd", "injection")
}
MODELS |= {
    f"several reads, {name}": {"topology": TOPOLOGIES[name], "attention": GATED, **FIRST_VALUES}
    for name, topology in SMALL.items()
    if len(topology.reads) > 1
}
MODELS |= {
    name: {"layers": 4, "anchors": anchors, "attention": SOFTMAX | {"qk_norm": norm, "window": 4, "window_layers": [1]}}
    for (name, anchors), norm in zip(SHARED.items(), ("rms", "rms_all", "dyt"), strict=True)
}
MODELS |= {kind: {"anchors": {"kind": kind}, "topology": TOPOLOGIES["mudd"]} for kind in ("lime", "depth_attention")}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_equals_one_pass(name: str) -> None:
    tokens, _ = tokens_and_targets(2, 8)
    model = randomise(residua.build(small(**MODELS[name])), 0.1).eval()
    whole, cache = model(tokens), model.new_cache(2, 8)
    parts = [model(part, cache=cache) for part in tokens[:, :7].split([3, 1, 3], 1)]
    close("in parts", torch.cat(parts, 1), whole[:, :7])
    last = InferenceDecoder(model, 8)(tokens[:, 7:], cache=cache)
    close("one token, rewritten", last, whole[:, 7:], 1e-7 if "multi_gate" in name else 1e-10)  # pools are in float32
    close("rewritten", InferenceDecoder(model)(tokens), whole)
