"""The families: how each differs from Llama. Their papers and code name the keys; transformers is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import FAMILIES as FAMILIES
from residua.convert.family import Family, Names, biased, gated_kind, layer_types, layer_windows, register, window_of
from residua.convert.family import find_family as find_family
from residua.convert.gemma import Gemma1, Gemma2, Gemma3
from residua.convert.kimi import KimiLinear


def head_qk_norm(tables: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """With QK-norm of each head, and biases if `attention_bias` says so."""
    bias = "all" if keys.get("attention_bias") else "none"
    tables["attention"] |= {"qk_norm": "rms", "qk_eps": keys["rms_norm_eps"], "bias": bias}
    return tables


def joint_qk_norm(tables: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """With QK-norm over all heads together, and biases if `attention_bias` says so."""
    tables = head_qk_norm(tables, keys)
    tables["attention"]["qk_norm"] = "rms_all"
    return tables


@register
class Llama(Family):
    """Llama 1 to 3: pre-norm, SwiGLU, grouped-query attention; optional biases."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        tables["attention"]["bias"] = "all" if keys.get("attention_bias") else "none"
        tables["ffn"]["bias"] = bool(keys.get("mlp_bias"))
        return tables

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        of_ffn = isinstance(config.ffn, choices.DenseChoice) and config.ffn.bias
        return super().keys(config) | {"attention_bias": biased(config), "mlp_bias": of_ffn}


@register
class Mistral(Family):
    """Mistral: Llama with a window in every layer, or none; Ministral, which also saves itself so: in some layers."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096}

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        return layer_windows(keys, keys.get("layer_types") or ["sliding_attention"] * keys["num_hidden_layers"])

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config) | {"sliding_window": window_of(config)}
        mixed = config.softmax is not None and config.softmax.window_layers is not None
        return keys | ({"layer_types": layer_types(config)} if mixed else {})


class Qwen(Family):
    """The common part of Qwen 2 and 3: a window in the layers from `max_window_layers` on, if it is switched on."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096}

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        if not keys.get("use_sliding_window"):
            return {}
        first = keys.get("max_window_layers", 28)
        derived = ["sliding_attention" if i >= first else "full_attention" for i in range(keys["num_hidden_layers"])]
        return layer_windows(keys, keys.get("layer_types") or derived)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        window = window_of(config)
        return super().keys(config) | {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": layer_types(config),
        }


@register
class Qwen2(Qwen):
    """Qwen 2 and 2.5: biases on queries, keys and values."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        tables["attention"]["bias"] = "qkv"
        return tables


@register
class Qwen3(Qwen):
    """Qwen 3: QK-norm, heads of a width of their own, no biases unless switched on."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Qwen.DEFAULTS, "head_dim": 128}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"attention_bias": biased(config)}


@register
class Olmo2(Family):
    """OLMo 2: norms on the sublayers' outputs, and QK-norm over all heads together."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rms_norm_eps": 1e-5}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "after.weight": ("post_attention_layernorm.weight",)}
    FEED_FORWARD: ClassVar[Names] = {**Family.FEED_FORWARD, "after.weight": ("post_feedforward_layernorm.weight",)}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return joint_qk_norm(super().tables(keys), keys) | {"placement": "output"}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"attention_bias": biased(config)}


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
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        "body.router.weight": ("block_sparse_moe.gate.weight",),
        "body.experts.up": ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        "body.experts.out": ("block_sparse_moe.experts.{e}.w2.weight",),
    }

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {} if keys.get("sliding_window") is None else {"window": keys["sliding_window"]}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config) | {"sliding_window": window_of(config)}
        keys.pop("norm_topk_prob")
        return keys


@register
class Qwen3Moe(Mixture):
    """Qwen 3 with experts in every layer."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096}
    HIDDEN = "moe_intermediate_size"
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        used = keys.get("use_sliding_window") and keys.get("sliding_window") is not None
        return {"window": keys["sliding_window"]} if used else {}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        window = window_of(config)
        return super().keys(config) | {
            "attention_bias": biased(config),
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        }


@register
class Olmoe(Mixture):
    """OLMoE: pre-norm, QK-norm over all heads together, weights of experts that need not sum to one."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rms_norm_eps": 1e-5}
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clip_qkv": ()}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return joint_qk_norm(super().tables(keys), keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"attention_bias": biased(config), "clip_qkv": None}


for family in (Gemma1, Gemma2, Gemma3, KimiLinear):
    register(family)
