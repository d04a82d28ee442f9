"""The choices in a model's configuration, and the rows of a covering array over them."""

from typing import Any

from residua.config.model import ModelConfig
from tests.model.depth import SMALL
from tests.model.pairwise import Row, covering_array
from tests.model.small import small

QKV = ["q", "k", "v"]
DYNAMIC = {"kind": "dynamic", "hidden": 4}

TOPOLOGIES: dict[str, Any] = {name: t.model_dump(exclude_none=True) for name, t in SMALL.items()}
ANCHORS: dict[str, Any] = {
    "none": {"kind": "none"},
    "resformer": {"kind": "resformer"},
    "gated_value": {"kind": "gated_value"},
    "value_embeddings": {"kind": "value_embeddings"},
    "lime": {"kind": "lime"},
    "depth_attention": {"kind": "depth_attention"},
    "cla": {"kind": "cla"},
    "svformer": {"kind": "kv_source", "shared": "v"},
    "nuresformer": {"kind": "nuresformer", "pathways": QKV, "granularity": "headwise"},
    "nuresformer with gate": {"kind": "nuresformer", "norm": "qk"},
    "exoformer": {"kind": "exoformer", "pathways": QKV},
    "exoformer with gate": {"kind": "exoformer", "granularity": "scalar", "norm": "none"},
    "exoformer dynamic": {"kind": "exoformer", "granularity": "headwise", "mixing": DYNAMIC},
}
NORMS: dict[str, Any] = {
    "rmsnorm": {"kind": "rmsnorm"},
    "preaffine": {"kind": "preaffine"},
    "gatednorm": {"kind": "gatednorm", "rank": 4},
    "gatednorm tensorwise": {"kind": "gatednorm", "rank": 4, "granularity": "tensorwise"},
    "gatednorm tanh": {"kind": "gatednorm", "rank": 4, "activation": "tanh"},
    "gatednorm silu": {"kind": "gatednorm", "rank": 4, "activation": "silu"},
    "gatednorm identity": {"kind": "gatednorm", "rank": 4, "activation": "identity"},
    "layernorm": {"kind": "layernorm"},
    "layernorm bare": {"kind": "layernorm", "parameters": "none"},
    "unit_rmsnorm": {"kind": "unit_rmsnorm"},
    "dyt": {"kind": "dyt"},
    "derf": {"kind": "derf"},
    "gated_dyt": {"kind": "gated_dyt", "rank": 4},
}
FFNS: dict[str, Any] = {kind: {"kind": kind, "hidden": 24} for kind in ("swiglu", "glu", "relu2", "gelu")}
MOE = {"kind": "moe", "hidden": 8}
SIGMOID = {"activation": "relu2", "dense_layers": 1, "router": {"kind": "sigmoid_scores", "scale": 2.0}}
GROUPS = {"router": {"kind": "softmax_scores", "groups": 3, "top_groups": 2}}
FFNS |= {
    "moe": MOE | {"experts": 6, "top_k": 2, "shared_gate": "sigmoid"} | GROUPS,
    "moe plain": MOE | {"experts": 4, "top_k": 3, "shared": 0, "bias": True} | SIGMOID,
}
LINEAR = {"kind": "gated_deltanet", "key_heads": 1, "value_heads": 2, "head_dim": 8}
XSA = {"own_value": "removed", "softcap": 0.7, "query_growth": {"beta": 0.5, "original_context": 2}}
HYBRID = {"kind": "hybrid", "softmax_every": 2, "linear": LINEAR}
DELTA = {"kind": "kimi_delta", "heads": 2, "head_dim": 8}
LATENT = {"kind": "mla", "heads": 2, "head_dim": 6, "shared_dim": 4, "rank": 10, "value_dim": 5}
NOWHERE = LATENT | {"positions": "none"}
ATTENTIONS: dict[str, Any] = {
    "plain": {"kind": "softmax", "heads": 2},
    "gated": {"kind": "softmax", "heads": 2, "gate": "elementwise"},
    "grouped": {"kind": "softmax", "heads": 4, "kv_heads": 2, "gate": "headwise"},
    "no qk-norm": {"kind": "softmax", "heads": 2, "qk_norm": "none"},
    "sink": {"kind": "softmax", "heads": 2, "head_dim": 6, "sink": "learned", "gate": "elementwise"},
    "linear": LINEAR,
    "hybrid": HYBRID | {"softmax": {"heads": 2}},
    "hybrid gated": HYBRID | {"softmax": {"heads": 4, "kv_heads": 2, "gate": "elementwise"} | XSA},
    "latent": LATENT | {"query_rank": 7},
    "hybrid kimi": {"kind": "hybrid", "softmax_layers": [1, 2], "softmax": NOWHERE, "linear": DELTA},
}
HEADS: dict[str, Any] = {"tied": {"kind": "tied"}, "untied": {"kind": "untied"}}

TABLES = {
    "topology": TOPOLOGIES, "anchors": ANCHORS, "norm": NORMS, "attention": ATTENTIONS, "ffn": FFNS, "head": HEADS,
}  # fmt: skip
GATED_ANCHORS = {"nuresformer with gate", "exoformer with gate", "exoformer dynamic"}
SEVERAL_READS = {name for name, topology in SMALL.items() if len(topology.reads) > 1}
ONE_READ = {"linear", "hybrid", "hybrid gated", "latent", "hybrid kimi"}
GATED_ATTENTIONS = {"gated", "sink", "hybrid gated"}


def fits(row: Row) -> bool:
    """Pairs that the configuration refuses: a mixed gate without a gate; anchors, or several reads, on other attention;
    another norm where the topology norms.
    """
    anchors, attention = row.get("anchors", "none"), row.get("attention", "gated")
    if SMALL[row.get("topology", "additive")].norms_inputs and row.get("norm", "rmsnorm") != "rmsnorm":
        return False
    if anchors in GATED_ANCHORS and attention not in GATED_ATTENTIONS:
        return False
    if row.get("topology") in SEVERAL_READS and attention in ONE_READ:
        return False
    if anchors in ("cla", "svformer") and row.get("topology") in (
        *SEVERAL_READS,
        "injection",
    ):  # keys of other layers read nothing
        return False
    if anchors in ("lime", "depth_attention") and row.get("topology") == "injection":
        return False
    if row.get("topology") == "injection" and row.get("ffn", "swiglu").startswith("moe"):  # experts in a loop
        return False
    return anchors == "none" or attention not in ("linear", "latent", "hybrid kimi")


FACTORS = {factor: list(table) for factor, table in TABLES.items()}
ROWS = covering_array(FACTORS, fits)


def config_of(row: Row) -> ModelConfig:
    """Two layers; a hybrid has four, so that one softmax layer writes anchors and another mixes them.

    A head of its own has its logits capped.
    """
    layers = 4 if row["attention"].startswith("hybrid") else 2
    cap = {"logit_softcap": 2.0} if row.get("head") == "untied" else {}
    return small(layers=layers, **cap, **{factor: TABLES[factor][choice] for factor, choice in row.items()})


def name_of(row: Row) -> str:
    return " · ".join(row.values())
