"""Dense families that differ little from Llama. transformers is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config.model import ModelConfig, head_dim
from residua.config.positions import LongRope
from residua.convert.family import Family, softmax_of
from residua.convert.positions import FULL
from residua.errors import UserError


class Llama(Family, model_type="llama"):
    """Llama 1 to 3: pre-norm, SwiGLU, grouped-query attention; optional biases."""

    BIAS = ("attention_bias", "all")
    HELD_BY = Family.HELD_BY | {"ffn.bias": ("mlp_bias",)}
    SETTINGS = Family.SETTINGS | {"ffn.bias": False}


class Ministral(Family, model_type="ministral"):
    """Ministral: Mistral with a window in the layers that `layer_types` names."""

    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS = Family.DEFAULTS | {"sliding_window": 4096}


class Mistral(Ministral, model_type="mistral"):
    """Mistral: Llama with a window in every layer, or none; with `layer_types`, in some layers."""

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        if softmax_of(config).window_layers is None:
            del keys["layer_types"]
        return keys


class Ministral3(Family, model_type="ministral3"):
    """Ministral 3: Mistral whose queries grow with their position in long texts."""

    WINDOWS = ("sliding_window",)
    DEFAULTS = Family.DEFAULTS | {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        stored = keys.get("rope_scaling") or keys["rope_parameters"]
        beta, original = stored["llama_4_scaling_beta"], stored["original_max_position_embeddings"]
        growth = {"query_growth": {"beta": beta, "original_context": original}} if beta else {}
        return super().positions(keys) | growth

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, growth = super().keys(config), softmax_of(config).query_growth
        beta, original = (0.0, config.context) if growth is None else (growth.beta, growth.original_context)
        table = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original} | keys["rope_parameters"]
        return keys | {"rope_parameters": table}


class SeedOss(Llama, model_type="seed_oss"):
    """Seed-OSS: biases on queries, keys and values, and on the output if switched on."""

    DEFAULTS = Family.DEFAULTS | {"head_dim": 128, "attention_bias": True}

    def attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        if keys.get("attention_out_bias") and not keys["attention_bias"]:
            raise UserError("attention_out_bias without attention_bias is not supported.")
        only_in = keys["attention_bias"] and not keys.get("attention_out_bias")
        return super().attention(keys) | ({"bias": "qkv"} if only_in else {})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        bias = softmax_of(config).bias
        return super().keys(config) | {"attention_bias": bias != "none", "attention_out_bias": bias == "all"}


class SmolLM3(Llama, model_type="smollm3"):
    """SmolLM 3: Llama whose `no_rope_layers`, every fourth by default, have no positions."""

    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS = Family.DEFAULTS | {
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
    }

    def unturned(self, keys: dict[str, Any]) -> list[int]:
        layers, every = range(keys["num_hidden_layers"]), keys["no_rope_layer_interval"]
        turned = keys.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        return [layer for layer in layers if not turned[layer]]

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return layer in self.unturned(keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        still = softmax_of(config).unturned_layers or ()
        return super().keys(config) | {"no_rope_layers": [int(layer not in still) for layer in range(config.layers)]}


class Phi3(Family, model_type="phi3"):
    """Phi 3 and 4: packed projections, heads that may turn in part, a window in every layer or none."""

    partial = True
    WINDOWS = ("sliding_window",)
    DEFAULTS = Family.DEFAULTS | {"rms_norm_eps": 1e-5}
    ATTENTION = Family.ATTENTION | {"body.project.weight": ("self_attn.qkv_proj.weight",)}
    FEED_FORWARD = Family.FEED_FORWARD | {"body.gate_up.weight": ("mlp.gate_up_proj.weight",)}

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        stored = keys.get("rope_scaling") or keys.get("rope_parameters")
        if stored and stored.get("rope_type", stored.get("type")) in ("su", "yarn"):  # names in the first releases
            keys = keys | {"rope_scaling": stored | {"rope_type": "longrope"}}
        return super().positions(keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, scaling = super().keys(config), softmax_of(config).rope_scaling
        if isinstance(scaling, LongRope):  # transformers reads the original training length here
            keys["original_max_position_embeddings"] = scaling.original_context
        return keys


class Glm(Family, model_type="glm"):
    """GLM 4 of 2024: packed feed-forwards."""

    partial = interleaved = True
    BIAS = ("attention_bias", "qkv")
    DEFAULTS = Family.DEFAULTS | {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    }
    FEED_FORWARD = Phi3.FEED_FORWARD


class Glm4(Glm, model_type="glm4"):
    """GLM 4 of 2025: norms on both sides of a sublayer."""

    SETTINGS = Glm.SETTINGS | {"placement": "both"}
    ATTENTION = Family.ATTENTION | {"after.weight": ("post_self_attn_layernorm.weight",)}
    FEED_FORWARD = Glm.FEED_FORWARD | {"after.weight": ("post_mlp_layernorm.weight",)}


class Qwen2(Family, model_type="qwen2"):
    """Qwen 2 and 2.5: biases on queries, keys and values."""

    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS = Family.DEFAULTS | {"sliding_window": 4096, "max_window_layers": 28}
    SETTINGS = Family.SETTINGS | {"attention.bias": "qkv"}

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return bool(layer >= keys["max_window_layers"])


class Qwen3(Qwen2, model_type="qwen3"):
    """Qwen 3: QK-norm, heads of a width of their own, no biases unless switched on."""

    BIAS = ("attention_bias", "all")
    QK_NORM = "rms"
    DEFAULTS = Qwen2.DEFAULTS | {"head_dim": 128}


class Olmo2(Family, model_type="olmo2"):
    """OLMo 2: norms on the sublayers' outputs, and QK-norm over all heads together."""

    BIAS = ("attention_bias", "all")
    QK_NORM = "rms_all"
    SETTINGS = Family.SETTINGS | {"placement": "output"}
    DEFAULTS = Family.DEFAULTS | {"rms_norm_eps": 1e-5}
    ATTENTION = Family.ATTENTION | {"after.weight": ("post_attention_layernorm.weight",)}
    FEED_FORWARD = Family.FEED_FORWARD | {"after.weight": ("post_feedforward_layernorm.weight",)}


class Olmo3(Olmo2, model_type="olmo3"):
    """OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled."""

    layered = True
    ABSENT = ("rope_local_base_freq", "sliding_window_pattern")
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS = Olmo2.DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}


class Exaone4(Olmo2, model_type="exaone4"):
    """EXAONE 4: norms on outputs, QK-norm of each head; with windows, the layers without one have no positions."""

    ABSENT = ("attention_bias",)
    QK_NORM = "rms"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS = Olmo3.DEFAULTS | {"rope_theta": 10_000.0, "num_key_value_heads": 32}

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        pattern = keys["sliding_window_pattern"]
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L" and layer + 1 < keys["num_hidden_layers"]
        return bool(pattern) and super().slides(layer, keys)

    def unturned(self, keys: dict[str, Any]) -> list[int]:
        if keys.get("sliding_window") is None:
            return []
        return [layer for layer, kind in enumerate(self.types(keys)) if kind == FULL]


class Factors(Family):
    """Scores times `attention_multiplier`, outputs of sublayers times `residual_multiplier`, logits / `logits_scaling`.

    The factors are folded into queries, output maps and the gain of the final norm.
    """

    BIAS = ("attention_bias", "all")
    FREE: ClassVar[dict[str, Any]] = {"attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
    DEFAULTS = Family.DEFAULTS | FREE | {"embedding_multiplier": 1.0}
    HELD_BY = Family.HELD_BY | {"embed_scale": ("embedding_multiplier",)}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"attention_multiplier": head_dim(config) ** -0.5}

    def change(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> tuple[float, float]:
        if name == "norm.weight":
            return 0.0, 1 / keys["logits_scaling"]
        return 0.0, keys["residual_multiplier"] if ".body.out." in name or name.endswith("experts.out") else 1.0

    def score_factor(self, width: int, keys: Mapping[str, Any]) -> float:
        return float(keys["attention_multiplier"] * width**0.5)


class Granite(Factors, Llama, model_type="granite"):
    """Granite 3: factors on embedding, scores, residuals and logits, which go into the weights."""

    HELD_BY = Llama.HELD_BY | Factors.HELD_BY
