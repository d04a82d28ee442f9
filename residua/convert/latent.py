"""Families with latent attention and experts: DeepSeek-V2 and V3, Kimi Linear. transformers is the reference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, expert_names, shared_names
from residua.convert.layouts import KERNELS, RATES, Layout, by_head, reordered, turned_order
from residua.convert.mixture import SigmoidMixture
from residua.convert.positions import FULL, LINEAR
from residua.errors import UserError

SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names in the published config.json → names that transformers also accepts."""
LINEAR_SPELLINGS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The same for the keys of its linear_attn_config."""


class Latent(SigmoidMixture):
    """Latent attention, and experts."""

    MIXERS: ClassVar[tuple[type, ...]] = (choices.LatentAttention,)
    HELD_BY = SigmoidMixture.HELD_BY | {
        "attention.heads": ("num_attention_heads", "num_key_value_heads"),
        "attention.head_dim": ("qk_nope_head_dim",),
        "attention.value_dim": ("v_head_dim",),
        "attention.shared_dim": ("qk_rope_head_dim",),
        "attention.rank": ("kv_lora_rank",),
        "attention.query_rank": ("q_lora_rank",),
    }
    SETTINGS = SigmoidMixture.SETTINGS | {"attention.kind": "mla", "attention.query_rank": None}
    DEFAULTS = SigmoidMixture.DEFAULTS | {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    UNKNOWN: ClassVar[dict[str, tuple[Any, ...]]] = {"attention_bias": (False,), "moe_layer_freq": (1,)}
    ATTENTION: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        "body.project.weight": ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        "body.norm.weight": ("self_attn.kv_a_layernorm.weight",),
        "body.expand.weight": ("self_attn.kv_b_proj.weight",),
        "body.out.weight": ("self_attn.o_proj.weight",),
        "body.query_norm.weight": ("self_attn.q_a_layernorm.weight",),
        "body.query.weight": ("self_attn.q_b_proj.weight",),
    }

    def attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        if keys.get("num_key_value_heads") not in (None, keys["num_attention_heads"]):
            raise UserError(f"num_key_value_heads = {keys['num_key_value_heads']} differs from num_attention_heads.")
        return self.positions(keys)

    def of_mixer(self, layer: int, config: ModelConfig) -> Names:
        names = super().of_mixer(layer, config)
        if not config.mixers[layer].attends or config.latent is None or config.latent.query_rank is None:
            return names
        return names | {"body.project.weight": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")}


class DeepseekV3(Latent, model_type="deepseek_v3"):
    """DeepSeek-V3, Kimi K2, Moonlight: latent attention, sigmoid scores, a choice among groups of experts."""

    DEFAULTS = Latent.DEFAULTS | {"q_lora_rank": 1536, "n_group": 8, "topk_group": 4}
    UNKNOWN = Latent.UNKNOWN | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
    FREE: ClassVar[dict[str, Any]] = {"rope_interleave": True}

    def score_factor(self, width: int, keys: Mapping[str, Any]) -> float:
        """The factor by which YaRN with `mscale_all_dim` scales scores, (0.1 · mscale_all_dim · ln factor + 1)²."""
        stored = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
        weight, factor = stored.get("mscale_all_dim"), stored.get("factor") or 1.0
        return float((0.1 * weight * math.log(factor) + 1) ** 2) if weight and factor > 1 else 1.0

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        latent = config.latent
        assert latent is not None
        queries = name.endswith("body.query.weight")
        if not queries and not name.endswith("body.project.weight"):
            return super().layout(name, config, keys)
        turned = turned_order(latent.shared_dim, interleaved=keys.get("rope_interleave", True))
        head = torch.cat([torch.arange(latent.head_dim), latent.head_dim + turned])
        rows = by_head((latent.heads,), (head,))
        factor = torch.full((len(rows),), self.score_factor(latent.head_dim, keys))
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


class KimiLinear(Latent, model_type="kimi_linear"):
    """Kimi Linear: delta and latent attention without positions, sigmoid scores, dense first layers."""

    MIXERS = (choices.LatentAttention, choices.KimiDelta)
    OTHER = LINEAR
    LEFT_OUT = ""
    WINDOWS = ("layer_types",)
    HELD_BY = (
        {"linear.eps": ("rms_norm_eps",)}
        | Latent.HELD_BY
        | {
            "ffn.experts": ("num_local_experts",),
            "linear.heads": ("linear_num_heads",),
            "linear.head_dim": ("linear_head_dim",),
            "linear.convolution": ("linear_conv_kernel_dim",),
        }
    )
    SETTINGS = Latent.SETTINGS | {"linear.kind": "kimi_delta"}
    DEFAULTS = Latent.DEFAULTS | {
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "num_local_experts": 256,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }
    UNKNOWN = Latent.UNKNOWN | {
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "num_nextn_predict_layers": (0,),
    }
    OTHER_ATTENTION: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        "body.project.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "body.gates.weight": ("self_attn.b_proj.weight", "self_attn.f_a_proj.weight", "self_attn.g_a_proj.weight"),
        "body.decay.weight": ("self_attn.f_b_proj.weight",),
        "body.gate.weight": ("self_attn.g_b_proj.weight",),
        "body.convolve.weight": tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv"),
        "body.A_log": ("self_attn.A_log",),
        "body.dt_bias": ("self_attn.dt_bias",),
        "body.norm.weight": ("self_attn.o_norm.weight",),
        "body.out.weight": ("self_attn.o_proj.weight",),
    }
    FEED_FORWARD = (
        Family.FEED_FORWARD
        | expert_names("block_sparse_moe", ("w1", "w3", "w2"))
        | {"body.router.bias": ("block_sparse_moe.gate.e_score_correction_bias",)}
        | shared_names("block_sparse_moe.shared_experts")
    )
    LAYOUTS: ClassVar[dict[str, Layout]] = {"convolve.weight": KERNELS, "A_log": RATES}

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        usual = {SPELLINGS.get(key, key): value for key, value in keys.items()}
        linear = usual.pop("linear_attn_config", None)
        if not isinstance(linear, dict):
            return usual
        usual |= {new: linear[old] for old, new in LINEAR_SPELLINGS.items() if old in linear}
        full = linear.get("full_attn_layers")
        if isinstance(full, list) and isinstance(layers := usual.get("num_hidden_layers"), int):
            # the published file counts layers from 1
            usual["layer_types"] = [FULL if layer + 1 in full else LINEAR for layer in range(layers)]
        return usual

    def named(self, tensor: str) -> str:
        """The usual name: transformers saves dense layers under the names of layers with experts."""
        return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", tensor)

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"positions": "none"}

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return not layer or layer % 4 != 0

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = {"num_attention_heads": 1} | super().keys(config)  # without latent attention, it needs the key too
        dense = keys.pop("first_k_dense_replace")
        return keys | {"mlp_layer_types": ["dense" if n < dense else "sparse" for n in range(config.layers)]}
