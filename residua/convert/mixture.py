"""Families with experts in every layer. transformers is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, alike, gated_kind, register
from residua.convert.layouts import Layout, TransposedStacks
from residua.convert.llama import Olmo2, head_qk_norm, joint_qk_norm
from residua.errors import UserError


class Mixture(Family):
    """The common part of mixtures of experts: Qwen's names of their parts."""

    mixture = True
    EXPERTS: ClassVar[tuple[str, ...]] = ("num_experts", "num_local_experts")
    """The names of the number of experts."""
    HIDDEN: ClassVar[str] = "intermediate_size"
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        "body.router.weight": ("mlp.gate.weight",),
        "body.experts.up": ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        "body.experts.out": ("mlp.experts.{e}.down_proj.weight",),
    }

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {
            "kind": "moe",
            "activation": gated_kind(keys["hidden_act"]),
            "hidden": keys[self.HIDDEN],
            "experts": next((keys[name] for name in self.EXPERTS if name in keys), None) or keys[self.EXPERTS[0]],
            "top_k": keys["num_experts_per_tok"],
            "normalize": bool(keys.get("norm_topk_prob")),
            "shared": 0,
        }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, ffn = super().keys(config), config.ffn
        assert isinstance(ffn, choices.MoE)
        return keys | {
            self.HIDDEN: ffn.hidden,
            **dict.fromkeys(self.EXPERTS, ffn.experts),
            "num_experts_per_tok": ffn.top_k,
            "norm_topk_prob": ffn.normalize,
        }


@register
class Mixtral(Mixture):
    """Mixtral: Mistral with experts, whose chosen weights sum to one."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "norm_topk_prob": True,
    }
    EXPERTS: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    WINDOWS = ("sliding_window",)
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        "body.router.weight": ("block_sparse_moe.gate.weight",),
        "body.experts.up": ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        "body.experts.out": ("block_sparse_moe.experts.{e}.w2.weight",),
    }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        keys.pop("norm_topk_prob")
        return keys


@register
class GptOss(Mixture):
    """gpt-oss: sinks, windows in every other layer, biases of experts and router, a clamped activation."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    BIAS = ("attention_bias", "all")
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "attention_bias": True,
        "norm_topk_prob": True,
    }
    EXPERTS: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "body.sink": ("self_attn.sinks",)}
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        "body.router.weight": ("mlp.router.weight",),
        "body.router.offset": ("mlp.router.bias",),
        "body.experts.up": ("mlp.experts.gate_up_proj",),
        "body.experts.up_bias": ("mlp.experts.gate_up_proj_bias",),
        "body.experts.out": ("mlp.experts.down_proj",),
        "body.experts.out_bias": ("mlp.experts.down_proj_bias",),
    }

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        tables["attention"]["sink"] = "learned"
        tables["ffn"] |= {"activation": "clamped_swiglu", "bias": True}
        return tables

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".experts." in name:
            return TransposedStacks(config.ffn.experts, interleaved=".experts.up" in name)
        return super().layout(name, config, keys)


@register
class Qwen3Moe(Mixture):
    """Qwen 3 MoE: experts in every layer."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    BIAS = ("attention_bias", "all")
    WINDOWS = ("use_sliding_window", "sliding_window")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096}
    HIDDEN = "moe_intermediate_size"
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"mlp_only_layers": [], "decoder_sparse_step": 1}


@register
class Olmoe(Mixture):
    """OLMoE: pre-norm, QK-norm over all heads together, weights of experts that need not sum to one."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    BIAS = ("attention_bias", "all")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rms_norm_eps": 1e-5}
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clip_qkv": ()}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return joint_qk_norm(super().tables(keys), keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"clip_qkv": None}


@register
class FlexOlmo(Mixture):
    """FlexOlmo: OLMo 2 with experts, whose weights need not sum to one."""

    model_type = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    BIAS = ("attention_bias", "all")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rope_theta": 500_000.0}
    ATTENTION: ClassVar[Names] = Olmo2.ATTENTION
    FEED_FORWARD: ClassVar[Names] = {
        **Mixture.FEED_FORWARD,
        "after.weight": ("post_feedforward_layernorm.weight",),
    }

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return joint_qk_norm(super().tables(keys), keys) | {"placement": "output"}


class SharedExpert(Mixture):
    """A shared expert behind a sigmoid gate, as wide as a whole number of the others."""

    HIDDEN = "moe_intermediate_size"
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = Qwen3Moe.UNKNOWN
    FEED_FORWARD: ClassVar[Names] = {
        **Mixture.FEED_FORWARD,
        **alike("body.shared.gate_up", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        **alike("body.shared.out", "mlp.shared_expert.down_proj"),
        "body.shared_gate.weight": ("mlp.shared_expert_gate.weight",),
    }

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        shared, rest = divmod(keys["shared_expert_intermediate_size"], keys[self.HIDDEN])
        if rest or not shared:
            raise UserError(
                f"shared_expert_intermediate_size = {keys['shared_expert_intermediate_size']} is not a multiple of "
                f"{self.HIDDEN} = {keys[self.HIDDEN]}, which is missing here."
            )
        return super().feed_forward(keys) | {"shared": shared, "shared_gate": "sigmoid"}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, ffn = super().keys(config), config.ffn
        assert isinstance(ffn, choices.MoE)
        keys["shared_expert_intermediate_size"] = max(1, ffn.shared) * ffn.hidden
        return keys | {"mlp_only_layers": [], "decoder_sparse_step": 1}


@register
class Qwen2Moe(SharedExpert):
    """Qwen 2 MoE: experts in every layer and a gated shared one."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    BIAS = ("qkv_bias", "qkv")
    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "qkv_bias": True,
    }

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return layer % 2 == 0 and layer < keys["max_window_layers"]
