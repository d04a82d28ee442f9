"""Cohere: parallel sublayers with one LayerNorm without a bias, and logits times a factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config.model import ModelConfig
from residua.convert.family import Names, register
from residua.convert.gpt import LayerNormed, SharedNorm
from residua.convert.layouts import Layout, Reordered
from residua.convert.llama import query_key_order


@register
class Cohere(SharedNorm, LayerNormed):
    """Command R: parallel sublayers with one LayerNorm without a bias, a factor on logits; QK-norm is refused."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    BIAS = ("attention_bias", "all")
    PARAMETERS = "gain"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **LayerNormed.DEFAULTS,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"use_qk_norm": (False,)}
    FREE: ClassVar[tuple[str, ...]] = ("logit_scale",)
    FEED_FORWARD: ClassVar[Names] = {**LayerNormed.FEED_FORWARD, "norm.weight": ("input_layernorm.weight",)}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"logit_scale": 1.0}

    def change(self, name: str, keys: Mapping[str, Any]) -> tuple[float, float]:
        return 0.0, ({**self.DEFAULTS, **keys}["logit_scale"] if name == "norm.weight" else 1.0)

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".body.project." in name:
            return Reordered(query_key_order(config, interleaved=True))
        return super().layout(name, config, keys)


@register
class Cohere2(Cohere):
    """Command R7B and A: Command R with windows in three of four layers, and no positions in the others."""

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Cohere.DEFAULTS,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        has_window = keys["sliding_window"] is not None
        still = [i for i, kind in enumerate(self.types(keys)) if kind == "full_attention" or not has_window]
        return super().positions(keys) | ({"unturned_layers": still} if still else {})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        del keys["head_dim"]
        return keys
