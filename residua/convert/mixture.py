"""Families with experts in every layer. transformers is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, expert_names, shared_names, softmax_of
from residua.convert.layouts import Layout, stacks, transposed_stacks
from residua.convert.llama import Factors, Olmo2
from residua.errors import UserError

NORM: Names = {"norm.weight": ("post_attention_layernorm.weight",)}


class Mixture(Family):
    """The base of mixtures of experts, with Qwen's names for their parts."""

    mixture = True
    HELD_BY = Family.HELD_BY | {
        "ffn.experts": ("num_experts", "num_local_experts"),
        "ffn.top_k": ("num_experts_per_tok",),
        "ffn.normalize": ("norm_topk_prob",),
    }
    SETTINGS = Family.SETTINGS | {"ffn.kind": "moe", "ffn.shared": 0, "ffn.normalize": False}
    FEED_FORWARD: ClassVar[Names] = NORM | expert_names()


class Mixtral(Mixture, model_type="mixtral"):
    """Mixtral: Mistral with experts, whose chosen weights sum to one."""

    DEFAULTS = Family.DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
    HELD_BY = Family.HELD_BY | {"ffn.experts": ("num_local_experts",), "ffn.top_k": ("num_experts_per_tok",)}
    SETTINGS = Mixture.SETTINGS | {"ffn.normalize": True}
    WINDOWS = ("sliding_window",)
    FEED_FORWARD = NORM | expert_names("block_sparse_moe", ("w1", "w3", "w2"))


class GraniteMoe(Factors, Mixture, model_type="granitemoe"):
    """Granite 3 MoE: the same factors, and experts whose chosen weights sum to one."""

    HELD_BY = Mixtral.HELD_BY | Factors.HELD_BY
    SETTINGS = Mixtral.SETTINGS
    FEED_FORWARD = NORM | {
        "body.router.weight": ("block_sparse_moe.router.layer.weight",),
        "body.experts.up": ("block_sparse_moe.input_linear.weight",),
        "body.experts.out": ("block_sparse_moe.output_linear.weight",),
    }

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        return stacks(config.ffn.experts) if ".experts." in name else super().layout(name, config, keys)


class GptOss(Mixture, model_type="gpt_oss"):
    """gpt-oss: sinks, windows in every other layer, biases of experts and router, a clamped activation."""

    BIAS = ("attention_bias", "all")
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS = Family.DEFAULTS | {
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
    }
    HELD_BY = Mixtral.HELD_BY
    SETTINGS = Mixtral.SETTINGS | {"attention.sink": "learned", "ffn.activation": "clamped_swiglu", "ffn.bias": True}
    UNKNOWN = Family.UNKNOWN | {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
    ATTENTION = Family.ATTENTION | {"body.sink": ("self_attn.sinks",)}
    FEED_FORWARD = NORM | {
        "body.router.weight": ("mlp.router.weight",),
        "body.router.offset": ("mlp.router.bias",),
        "body.experts.up": ("mlp.experts.gate_up_proj",),
        "body.experts.up_bias": ("mlp.experts.gate_up_proj_bias",),
        "body.experts.out": ("mlp.experts.down_proj",),
        "body.experts.out_bias": ("mlp.experts.down_proj_bias",),
    }

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".experts." in name:
            return transposed_stacks(config.ffn.experts, interleaved=".experts.up" in name)
        return super().layout(name, config, keys)


class Qwen3Moe(Mixture, model_type="qwen3_moe"):
    """Qwen 3 MoE: experts in every layer."""

    BIAS = ("attention_bias", "all")
    WINDOWS = ("use_sliding_window", "sliding_window")
    QK_NORM = "rms"
    DEFAULTS = Family.DEFAULTS | {"sliding_window": 4096}
    HELD_BY = Mixture.HELD_BY | {"ffn.hidden": ("moe_intermediate_size",)}
    UNKNOWN = Family.UNKNOWN | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}


class Olmoe(Mixture, model_type="olmoe"):
    """OLMoE: pre-norm, QK-norm over all heads together, weights of experts that need not sum to one."""

    BIAS = ("attention_bias", "all")
    QK_NORM = "rms_all"
    DEFAULTS = Family.DEFAULTS | {"rms_norm_eps": 1e-5}
    UNKNOWN = Family.UNKNOWN | {"clip_qkv": ()}


class FlexOlmo(Olmo2, Mixture, model_type="flex_olmo"):
    """FlexOlmo: OLMo 2 with experts, whose weights need not sum to one."""

    SETTINGS = Mixture.SETTINGS | Olmo2.SETTINGS
    DEFAULTS = Family.DEFAULTS | {"rope_theta": 500_000.0}
    FEED_FORWARD = expert_names() | {"after.weight": ("post_feedforward_layernorm.weight",)}


class SharedExpert(Mixture):
    """A shared expert with a sigmoid gate; its width is a multiple of the other experts'."""

    HELD_BY = Qwen3Moe.HELD_BY
    SETTINGS = Mixture.SETTINGS | {"ffn.shared_gate": "sigmoid"}
    UNKNOWN = Qwen3Moe.UNKNOWN
    FEED_FORWARD = (
        Mixture.FEED_FORWARD
        | shared_names("mlp.shared_expert")
        | {"body.shared_gate.weight": ("mlp.shared_expert_gate.weight",)}
    )

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(keys)
        shared, rest = divmod(keys["shared_expert_intermediate_size"], settings["ffn.hidden"] or 1)
        if rest or not shared:
            raise UserError(
                f"shared_expert_intermediate_size = {keys['shared_expert_intermediate_size']} is not a multiple of "
                f"moe_intermediate_size = {settings['ffn.hidden']}, which is not supported."
            )
        return settings | {"ffn.shared": shared}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        ffn = config.ffn
        assert isinstance(ffn, choices.MoE)
        return super().keys(config) | {"shared_expert_intermediate_size": max(1, ffn.shared) * ffn.hidden}


class Qwen2Moe(SharedExpert, model_type="qwen2_moe"):
    """Qwen 2 MoE: experts in every layer and a gated shared one."""

    BIAS = ("qkv_bias", "qkv")
    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS = Family.DEFAULTS | {
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


class SigmoidMixture(Mixture):
    """Experts chosen by sigmoid scores with a bias, a shared expert, dense first layers (DeepSeek-V3)."""

    HELD_BY = Mixture.HELD_BY | {
        "ffn.hidden": ("moe_intermediate_size",),
        "ffn.experts": ("n_routed_experts",),
        "ffn.shared": ("n_shared_experts",),
        "ffn.router.scale": ("routed_scaling_factor",),
        "ffn.router.groups": ("n_group",),
        "ffn.router.top_groups": ("topk_group",),
        "ffn.dense_layers": ("first_k_dense_replace",),
    }
    SETTINGS = Mixture.SETTINGS | {
        "ffn.router.kind": "sigmoid_scores",
        "ffn.router.groups": 1,
        "ffn.router.top_groups": 1,
    }
    DEFAULTS = Family.DEFAULTS | {
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    }
    FEED_FORWARD = (
        Family.FEED_FORWARD
        | expert_names()
        | {"body.router.bias": ("mlp.gate.e_score_correction_bias",)}
        | shared_names("mlp.shared_experts")
    )
    LEFT_OUT = r"model\.layers\.{layers}\..*"  # layers after the last predict further tokens in training

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        dense, types = keys["first_k_dense_replace"], keys.get("mlp_layer_types")
        if types is not None:
            dense = types.count("dense")
            if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
                raise UserError("mlp_layer_types has a dense layer after one with experts, which is not supported.")
        hidden = {"ffn.dense_hidden": keys["intermediate_size"]} if dense else {}
        return super().settings(keys) | {"ffn.dense_layers": dense, **hidden}


class Glm4Moe(SigmoidMixture, model_type="glm4_moe"):
    """GLM 4.5 and 4.6: experts after the first layers, QK-norm if switched on."""

    partial = True
    BIAS = ("attention_bias", "qkv")
    DEFAULTS = SigmoidMixture.DEFAULTS | {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
    }

    def attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        normed = {"qk_norm": "rms", "qk_eps": keys["rms_norm_eps"]} if keys.get("use_qk_norm") else {}
        return super().attention(keys) | normed

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"use_qk_norm": softmax_of(config).qk_norm == "rms"}
