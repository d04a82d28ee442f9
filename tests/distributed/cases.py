"""Small runs that one process and several ranks must train identically."""

from typing import Any

import torch

from residua.config.run import RunConfig
from residua.data.loader import IGNORED, Batch
from tests.model.page_plugins import register
from tests.model.small import VOCABULARY
from tests.trained import SMALL

ANCHORED = {"anchors": {"kind": "exoformer"}, "attention": {"kind": "softmax", "heads": 2, "gate": "elementwise"}}
MODELS: dict[str, dict[str, Any]] = {
    "additive": {"head": {"kind": "untied"}},
    "additive-32": {"vocab_size": 32},
    "full": {"topology": {"kind": "full_attnres"}},
    "block": {"topology": {"kind": "block_attnres", "sublayers_per_block": 2}},
    "mgr": {"topology": {"kind": "multi_gate", "streams": 3}},
    "mhc": {"topology": {"kind": "mhc", "streams": 2, "iterations": 3}},
    "exoformer": ANCHORED,
    "exo-block": {"topology": {"kind": "block_attnres", "sublayers_per_block": 2}, **ANCHORED},
    "nures": {"anchors": {"kind": "nuresformer", "pathways": ["q", "k", "v"]}, "topology": {"kind": "highway"}},
    "gated-values": {"anchors": {"kind": "gated_value"}},
    "value-embeddings": {"anchors": {"kind": "value_embeddings", "gate_channels": 5}},
    "svformer": {"anchors": {"kind": "kv_source", "shared": "v"}},
    "depth_attention": {"anchors": {"kind": "depth_attention"}},
    "lime": {"anchors": {"kind": "lime"}},
    "cla": {"anchors": {"kind": "cla"}},
    "hyper": {"topology": {"kind": "hyper", "streams": 2}},
    "dense": {"topology": {"kind": "dense", "dilation": 2}},
    "mudd": {"topology": {"kind": "mudd", "sources": 2}, "anchors": {"kind": "exoformer", "pathways": ["v"]}},
    "dca": {"topology": {"kind": "dca", "recent": 1}},
    "loop": {"order": {"kind": "loop", "prelude": 1, "coda": 1, "turns": 2}},
    "injection": {
        "order": {"kind": "loop", "prelude": 1, "coda": 1, "turns": 2},
        "topology": {"kind": "injection", "prelude": 1, "loop": 2, "turns": 2},
    },
    "value_input": {"topology": {"kind": "value_input"}},
    "token_gain": {"topology": {"kind": "token_gain", "rows": 7}},
    "resi_dual": {"topology": {"kind": "resi_dual"}},
    "delta": {"topology": {"kind": "delta_attnres", "sublayers_per_block": 2}},
    "gated": {"topology": {"kind": "gated_residual", "streams": 2, "rank": 3}},
    "x0": {"topology": {"kind": "x0"}},
    "places": {"topology": {"kind": "parallel"}, "norm": {"kind": "layernorm"}, "learned_positions": 6},
    "moe": {"ffn": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 8}},
    "biased": {
        "attention": {
            "kind": "hybrid",
            "softmax_every": 2,
            "softmax": {"kind": "mla", "heads": 2, "head_dim": 6, "shared_dim": 4, "rank": 10},
            "linear": {"kind": "kimi_delta", "heads": 2, "head_dim": 8},
        },
        "ffn": {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 8, "dense_layers": 1,
                "router": {"kind": "sigmoid_scores"}},
    },
}  # fmt: skip
PAGE_KINDS = ("token_gain", "value_input")
"""Topologies of docs/reference/extending.md."""
MIXTURES = ("moe", "biased")
STEPS, MICRO_BATCH, ACCUMULATE, LENGTH = 2, 2, 4, 6


def run_config(model: str, parallel: dict[str, Any] | None = None, layers: int = 4, **train: Any) -> RunConfig:
    """A model of four layers by default, and a recipe with four micro-batches per step."""
    if model in PAGE_KINDS:
        register(model)
    base = SMALL | {"vocab_size": VOCABULARY, "context": LENGTH, "layers": layers, "init": {"std": 0.2}}
    base["ffn"] = {"kind": "swiglu", "hidden": 24}
    schedule = {"kind": "cosine", "warmup": 0}
    recipe = {"steps": 10, "micro_batch": MICRO_BATCH, "accumulate": ACCUMULATE, "schedule": schedule}
    return RunConfig(
        model=base | MODELS[model],
        train={**recipe, "device": "cpu", "z_loss": 1e-3, "clip_norm": 0.1, **train},
        parallel={"split": "layers", **(parallel or {})},
    )


def deep_config(model: str, parallel: dict[str, Any] | None = None) -> RunConfig:
    """Eight wider layers, compared with which everything else is small."""
    return run_config(model, parallel, layers=8).override(["model.width=32", "model.ffn.hidden=32"])


def batches(step: int) -> list[Batch]:
    """The micro-batches of a step, with different numbers of targets in each."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(ACCUMULATE):
        tokens = torch.randint(VOCABULARY, (MICRO_BATCH, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, :number] = IGNORED
        made.append(Batch(tokens[:, :-1].contiguous(), targets, torch.arange(LENGTH).expand(MICRO_BATCH, -1) // 4))
    return made


def perturb(model: torch.nn.Module) -> None:
    """Move parameters away from zero, where many start: a query of zero would hide a wrong read."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
