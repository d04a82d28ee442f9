"""Granite: Llama with factors on embedding, scores, residuals and logits, which are worked into the weights here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from residua.config.model import ModelConfig, head_dim
from residua.convert.family import Family, Names, register
from residua.convert.layouts import Layout, Stacked
from residua.convert.llama import Llama, scaled_queries
from residua.convert.mixture import Mixture

FACTORS = {"embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}


class Factors(Family):
    """Scores times `attention_multiplier`, outputs of sublayers times `residual_multiplier`, logits / `logits_scaling`.

    Queries, last maps and the gain of the final norm take the factors in.
    """

    BIAS = ("attention_bias", "all")
    FREE: ClassVar[tuple[str, ...]] = ("attention_multiplier", "residual_multiplier", "logits_scaling")

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | {"embed_scale": float(keys["embedding_multiplier"])}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        changed = {"embedding_multiplier": config.embed_scale, "attention_multiplier": head_dim(config) ** -0.5}
        return super().keys(config) | FACTORS | changed

    def change(self, name: str, keys: Mapping[str, Any]) -> tuple[float, float]:
        known = FACTORS | dict(keys)
        if name == "norm.weight":
            return 0.0, 1 / known["logits_scaling"]
        return 0.0, known["residual_multiplier"] if ".body.out." in name or name.endswith("experts.out") else 1.0

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        factor = (FACTORS | dict(keys))["attention_multiplier"] * head_dim(config) ** 0.5
        return scaled_queries(config, factor) if ".body.project." in name else super().layout(name, config, keys)


@register
class Granite(Factors, Llama):
    """Granite 3: factors on embedding, scores, residuals and logits, which go into the weights."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, **FACTORS}


@register
class GraniteMoe(Factors, Mixture):
    """Granite 3 MoE: the same factors, and experts whose chosen weights sum to one."""

    model_type = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, **FACTORS, "norm_topk_prob": True}
    EXPERTS: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    FEED_FORWARD: ClassVar[Names] = {
        "norm.weight": ("post_attention_layernorm.weight",),
        "body.router.weight": ("block_sparse_moe.router.layer.weight",),
        "body.experts.up": ("block_sparse_moe.input_linear.weight",),
        "body.experts.out": ("block_sparse_moe.output_linear.weight",),
    }

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        keys.pop("norm_topk_prob")
        return keys

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".experts." in name:
            return Stacked(config.ffn.experts)
        return super().layout(name, config, keys)
