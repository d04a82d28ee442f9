"""GLM 4 to 4.5: heads that turn in part, by neighbouring pairs in the dense models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config.model import ModelConfig, head_dim
from residua.convert.family import Family, Names, alike, register
from residua.convert.kimi import SigmoidMixture
from residua.convert.layouts import Layout, Packed, Reordered, turned_order
from residua.convert.llama import head_qk_norm, query_key_order
from residua.convert.positions import turned_width


class PartlyTurned(Family):
    """Heads that turn in part, and biases on queries, keys and values if switched on."""

    partial = True
    BIAS = ("attention_bias", "qkv")
    interleaved: ClassVar[bool] = False

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".body.project." in name:
            return Reordered(query_key_order(config, interleaved=self.interleaved))
        if name.endswith(("qk_norm.query", "qk_norm.key")):
            return Reordered(turned_order(head_dim(config), turned_width(config), interleaved=self.interleaved))
        return super().layout(name, config, keys)


@register
class Glm(PartlyTurned):
    """GLM 4 of 2024: packed feed-forwards."""

    model_type = "glm"
    architecture = "GlmForCausalLM"
    interleaved = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    FEED_FORWARD: ClassVar[Names] = {**Family.FEED_FORWARD, "body.gate_up.weight": ("mlp.gate_up_proj.weight",)}
    LAYOUTS: ClassVar[Mapping[str, Layout]] = {"gate_up.weight": Packed()}


@register
class Glm4(Glm):
    """GLM 4 of 2025: norms on both sides of a sublayer."""

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "after.weight": ("post_self_attn_layernorm.weight",)}
    FEED_FORWARD: ClassVar[Names] = {**Glm.FEED_FORWARD, "after.weight": ("post_mlp_layernorm.weight",)}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | {"placement": "both"}


SIGMOID_EXPERTS: Names = {
    **Family.FEED_FORWARD,
    "body.router.weight": ("mlp.gate.weight",),
    "body.router.bias": ("mlp.gate.e_score_correction_bias",),
    "body.experts.up": ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
    "body.experts.out": ("mlp.experts.{e}.down_proj.weight",),
    **alike("body.shared.gate_up", "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    **alike("body.shared.out", "mlp.shared_experts.down_proj"),
}


class RoutedExperts(SigmoidMixture):
    """The names of DeepSeek-V3's experts."""

    EXPERTS = ("n_routed_experts",)
    FEED_FORWARD: ClassVar[Names] = SIGMOID_EXPERTS

    def is_left_out(self, tensor: str, config: ModelConfig) -> bool:
        """Layers after the last predict further tokens in training."""
        return re.match(rf"model\.layers\.{config.layers}\.", tensor) is not None

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        dense = config.layers - config.ffn.mixtures(config.layers)
        return super().keys(config) | {"first_k_dense_replace": dense}


@register
class Glm4Moe(PartlyTurned, RoutedExperts):
    """GLM 4.5 and 4.6: experts after the first layers, QK-norm if switched on."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        return head_qk_norm(tables, keys) if keys.get("use_qk_norm") else tables

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        normed = config.softmax is not None and config.softmax.qk_norm == "rms"
        return super().keys(config) | {"use_qk_norm": normed}
