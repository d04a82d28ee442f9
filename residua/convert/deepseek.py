"""DeepSeek-V2 and V3, and models that save themselves as such (Kimi K2, Moonlight): latent attention and experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from residua.config.model import ModelConfig
from residua.convert.family import Family
from residua.convert.kimi import Latent
from residua.convert.layouts import Layout, by_head, reordered, turned_order


class DeepseekV3(Latent, model_type="deepseek_v3"):
    """DeepSeek-V3, Kimi K2, Moonlight: latent attention, sigmoid scores, a choice among groups of experts."""

    DEFAULTS = Latent.DEFAULTS | {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
    }
    UNKNOWN = Family.UNKNOWN | {
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    }
    FREE: ClassVar[dict[str, Any]] = {"rope_interleave": True}

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        latent = config.latent
        assert latent is not None
        queries = name.endswith("body.query.weight")
        if not queries and not name.endswith("body.project.weight"):
            return super().layout(name, config, keys)
        turned = turned_order(latent.shared_dim, interleaved=keys.get("rope_interleave", True))
        head = torch.cat([torch.arange(latent.head_dim), latent.head_dim + turned])
        rows = by_head((latent.heads,), (head,))
        factor = torch.full((len(rows),), _score_factor(keys))
        if not queries:
            if latent.query_rank is not None:
                rows, factor = torch.arange(latent.query_rank), torch.ones(latent.query_rank)
            shared = torch.cat([torch.arange(latent.rank), latent.rank + turned])
            rows, factor = torch.cat([rows, len(rows) + shared]), torch.cat([factor, torch.ones(len(shared))])
        return reordered(rows, factor=factor)


class DeepseekV2(DeepseekV3, model_type="deepseek_v2"):
    """DeepSeek-V2 and V2-Lite: latent attention, softmax scores, a choice among groups of experts if switched on."""

    SETTINGS = DeepseekV3.SETTINGS | {"ffn.router.kind": "softmax_scores"}
    ABSENT = ("rope_interleave",)
    DEFAULTS = DeepseekV3.DEFAULTS | {
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    }
    UNKNOWN = DeepseekV3.UNKNOWN | {
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),  # transformers ignores this key
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
    }
    FREE: ClassVar[dict[str, Any]] = {}

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        greedy = keys["topk_method"] != "group_limited_greedy"
        return super().settings(keys) | ({"ffn.router.groups": 1, "ffn.router.top_groups": 1} if greedy else {})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        return keys | {"topk_method": "greedy" if keys["n_group"] == 1 else "group_limited_greedy"}


def _score_factor(keys: Mapping[str, Any]) -> float:
    """The factor by which YaRN with `mscale_all_dim` scales scores, (0.1 · mscale_all_dim · ln factor + 1)²."""
    stored = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    weight, factor = stored.get("mscale_all_dim"), stored.get("factor") or 1.0
    return float((0.1 * weight * math.log(factor) + 1) ** 2) if weight and factor > 1 else 1.0
