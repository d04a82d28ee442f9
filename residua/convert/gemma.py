"""The Gemmas: scaled embeddings, gains stored less one, norms on both sides and windows from Gemma 2 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, biased, layer_types, layer_windows, register, window_of
from residua.convert.layouts import Layout
from residua.convert.llama import scaled_queries
from residua.convert.positions import read_layered_positions, write_layered_positions


class Gemma(Family):
    """The common part of all Gemmas: embeddings times √width, gains stored less one, GeGLU."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_bidirectional_attention": (False,)}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys) | {
            "embed_scale": keys["hidden_size"] ** 0.5,
            "logit_softcap": keys.get("final_logit_softcapping"),
        }
        tables["attention"] |= {
            "bias": "all" if keys.get("attention_bias") else "none",
            "softcap": keys.get("attn_logit_softcapping"),
        }
        return tables

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"attention_bias": biased(config)}

    def change(self, name: str, keys: Mapping[str, Any]) -> tuple[float, float]:
        gain = name.endswith(("norm.weight", "after.weight", "qk_norm.query", "qk_norm.key"))
        return float(gain), 1.0


@register
class Gemma1(Gemma):
    """Gemma: embeddings times √width, gains stored less one, GeGLU."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        act = keys["hidden_act"]  # "gelu" stands for its approximation in the first releases
        return super().feed_forward(keys | {"hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act})


class SandwichGemma(Gemma):
    """The common part of Gemma 2 and 3: norms on both sides of a sublayer, and windows in most layers."""

    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "after.weight": ("post_attention_layernorm.weight",)}
    FEED_FORWARD: ClassVar[Names] = {
        **Family.FEED_FORWARD,
        "norm.weight": ("pre_feedforward_layernorm.weight",),
        "after.weight": ("post_feedforward_layernorm.weight",),
    }
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Gemma.DEFAULTS,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    }
    FREE: ClassVar[tuple[str, ...]] = ("query_pre_attn_scalar",)

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | {"placement": "both"}

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().feed_forward(keys | {"hidden_act": keys["hidden_activation"]})

    def window(self, keys: dict[str, Any]) -> dict[str, Any]:
        every, layers = keys["sliding_window_pattern"], range(keys["num_hidden_layers"])
        derived = ["sliding_attention" if (i + 1) % every else "full_attention" for i in layers]
        return layer_windows(keys, keys.get("layer_types") or derived)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        return keys | {
            "hidden_activation": keys["hidden_act"],
            "query_pre_attn_scalar": keys["head_dim"],
            "sliding_window": window_of(config),
            "layer_types": layer_types(config),
            "attn_logit_softcapping": None if config.softmax is None else config.softmax.softcap,
            "final_logit_softcapping": config.logit_softcap,
        }


@register
class Gemma2(SandwichGemma):
    """Gemma 2: norms on both sides of a sublayer, windows in every other layer, capped scores and logits."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SandwichGemma.DEFAULTS,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        factor = _score_factor({**self.DEFAULTS, **keys})
        return scaled_queries(config, factor) if ".body.project." in name else super().layout(name, config, keys)


@register
class Gemma3(SandwichGemma):
    """Gemma 3, text only: QK-norm, and another rotary base in the layers with a window."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **SandwichGemma.DEFAULTS,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    }
    # transformers' eager attention caps scores, and the one that it takes by default ignores the key
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Gemma.UNKNOWN, "attn_logit_softcapping": ()}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        tables["attention"] |= {"qk_norm": "rms", "qk_eps": keys["rms_norm_eps"]}
        if "window" not in tables["attention"]:
            tables["attention"].pop("local_rope_theta")
        return tables

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        return read_layered_positions(keys, self.DEFAULTS["rope_theta"], keys["rope_local_base_freq"])

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        layered = write_layered_positions(keys, config.softmax, self.DEFAULTS["rope_local_base_freq"])
        return keys | layered | {"attn_logit_softcapping": None}

    def change(self, name: str, keys: Mapping[str, Any]) -> tuple[float, float]:
        shift, scale = super().change(name, keys)
        return shift, _score_factor({**self.DEFAULTS, **keys}) if name.endswith("qk_norm.query") else scale


def _score_factor(keys: Mapping[str, Any]) -> float:
    """Scores are divided by √query_pre_attn_scalar there and by √head_dim here."""
    return float((keys["head_dim"] / keys["query_pre_attn_scalar"]) ** 0.5)
