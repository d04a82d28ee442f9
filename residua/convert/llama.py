"""Dense families that are Llama with few differences. transformers is the reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config import choices
from residua.config.model import ModelConfig, head_dim
from residua.config.positions import LongRope
from residua.convert.family import Family, Names, register
from residua.convert.layouts import ROWS, Layout, Packed, Reordered, by_head, turned_order
from residua.convert.positions import read_layered_positions, turned_width, write_layered_positions
from residua.errors import UserError


def head_qk_norm(tables: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """With QK-norm of each head."""
    tables["attention"] |= {"qk_norm": "rms", "qk_eps": keys["rms_norm_eps"]}
    return tables


def joint_qk_norm(tables: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """With QK-norm over all heads together."""
    tables = head_qk_norm(tables, keys)
    tables["attention"]["qk_norm"] = "rms_all"
    return tables


def query_key_order(config: ModelConfig, *, interleaved: bool = False) -> Tensor:
    """The rows of the stacked queries, keys and values of theirs in our order, where queries and keys turn."""
    softmax, width = config.softmax, head_dim(config)
    assert softmax is not None
    order, kv = turned_order(width, turned_width(config), interleaved=interleaved), softmax.kv_heads or softmax.heads
    return by_head((softmax.heads, kv, kv), (order, order, torch.arange(width)))


def scaled_queries(config: ModelConfig, factor: float) -> Layout:
    """Stacked queries, keys and values whose queries take a factor on scores in."""
    softmax = config.softmax
    assert softmax is not None
    heads = [softmax.heads, 2 * (softmax.kv_heads or softmax.heads)]
    rows = torch.tensor(heads) * head_dim(config)
    every = torch.arange(int(rows.sum()))
    return ROWS if factor == 1 else Reordered(every, None, torch.tensor([factor, 1.0]).repeat_interleave(rows))


@register
class Llama(Family):
    """Llama 1 to 3: pre-norm, SwiGLU, grouped-query attention; optional biases."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    BIAS = ("attention_bias", "all")

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().feed_forward(keys) | {"bias": bool(keys.get("mlp_bias"))}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"mlp_bias": isinstance(config.ffn, choices.DenseChoice) and config.ffn.bias}


@register
class Mistral(Family):
    """Mistral: Llama with a window in every layer, or none; with `layer_types`, in some layers."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        if config.softmax is None or config.softmax.window_layers is None:
            del keys["layer_types"]
        return keys


@register
class Ministral(Family):
    """Ministral: Mistral with a window in the layers that `layer_types` names."""

    model_type = "ministral"
    architecture = "MinistralForCausalLM"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = Mistral.DEFAULTS


@register
class Ministral3(Family):
    """Ministral 3: Mistral whose queries grow with their position in long texts."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    WINDOWS = ("sliding_window",)
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
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
        keys, growth = super().keys(config), None if config.softmax is None else config.softmax.query_growth
        beta, original = (0.0, config.context) if growth is None else (growth.beta, growth.original_context)
        table = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original} | keys["rope_parameters"]
        return keys | {"rope_parameters": table}


@register
class SeedOss(Llama):
    """Seed-OSS: biases on queries, keys and values, and on the output if switched on."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "head_dim": 128, "attention_bias": True}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        if keys.get("attention_out_bias") and not keys["attention_bias"]:
            raise UserError("attention_out_bias without attention_bias has no counterpart here.")
        tables = super().tables(keys)
        if keys["attention_bias"] and not keys.get("attention_out_bias"):
            tables["attention"]["bias"] = "qkv"
        return tables

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        bias = "none" if config.softmax is None else config.softmax.bias
        return super().keys(config) | {"attention_bias": bias != "none", "attention_out_bias": bias == "all"}


@register
class SmolLM3(Llama):
    """SmolLM 3: Llama whose `no_rope_layers`, every fourth by default, have no positions."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 4,
    }

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        layers, every = range(keys["num_hidden_layers"]), keys["no_rope_layer_interval"]
        turned = keys.get("no_rope_layers") or [(layer + 1) % every for layer in layers]
        still = [layer for layer in layers if not turned[layer]]
        return super().positions(keys) | ({"unturned_layers": still} if still else {})

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return layer in self.positions(keys).get("unturned_layers", ())

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        still = () if config.softmax is None else config.softmax.unturned_layers or ()
        return super().keys(config) | {"no_rope_layers": [int(layer not in still) for layer in range(config.layers)]}


@register
class Phi3(Family):
    """Phi 3 and 4: packed projections, heads that may turn in part, a window in every layer or none."""

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    partial = True
    WINDOWS = ("sliding_window",)
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rms_norm_eps": 1e-5}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "body.project.weight": ("self_attn.qkv_proj.weight",)}
    FEED_FORWARD: ClassVar[Names] = {**Family.FEED_FORWARD, "body.gate_up.weight": ("mlp.gate_up_proj.weight",)}
    LAYOUTS: ClassVar[Mapping[str, Layout]] = {"gate_up.weight": Packed()}

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        stored = keys.get("rope_scaling") or keys.get("rope_parameters")
        if stored and stored.get("rope_type", stored.get("type")) in ("su", "yarn"):  # the first releases' names
            keys = keys | {"rope_scaling": stored | {"rope_type": "longrope"}}
        return super().positions(keys)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys, scaling = super().keys(config), None if config.softmax is None else config.softmax.rope_scaling
        if isinstance(scaling, LongRope):  # transformers reads the length of the first training here
            keys["original_max_position_embeddings"] = scaling.original_context
        return keys

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if name.endswith("project.weight"):
            order = query_key_order(config)
            return Reordered(order, (len(order),))
        return super().layout(name, config, keys)


class Qwen(Family):
    """The common part of Qwen 2 and 3: a window in the layers from `max_window_layers` on, if it is switched on."""

    WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "sliding_window": 4096, "max_window_layers": 28}

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        return bool(layer >= keys["max_window_layers"])


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
    BIAS = ("attention_bias", "all")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Qwen.DEFAULTS, "head_dim": 128}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys)


@register
class Olmo2(Family):
    """OLMo 2: norms on the sublayers' outputs, and QK-norm over all heads together."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    BIAS = ("attention_bias", "all")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "rms_norm_eps": 1e-5}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, "after.weight": ("post_attention_layernorm.weight",)}
    FEED_FORWARD: ClassVar[Names] = {**Family.FEED_FORWARD, "after.weight": ("post_feedforward_layernorm.weight",)}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return joint_qk_norm(super().tables(keys), keys) | {"placement": "output"}


@register
class Olmo3(Olmo2):
    """OLMo 3: OLMo 2 with windows in three of four layers, whose positions are not scaled."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Olmo2.DEFAULTS,
        "rope_theta": 500_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        theta = self.DEFAULTS["rope_theta"]
        positions = read_layered_positions(keys, theta, keys.get("rope_theta", theta))
        same = "rope_scaling" not in positions and positions["local_rope_theta"] == positions["rope_theta"]
        if same or not self.window(keys):
            del positions["local_rope_theta"]
        return positions

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        return keys | write_layered_positions(keys, config.softmax, keys["rope_parameters"]["rope_theta"])


@register
class Exaone4(Family):
    """EXAONE 4: norms on outputs, QK-norm of each head; with windows, the layers without one have no positions."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    WINDOWS = ("sliding_window", "layer_types")
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    ATTENTION: ClassVar[Names] = Olmo2.ATTENTION
    FEED_FORWARD: ClassVar[Names] = Olmo2.FEED_FORWARD

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return head_qk_norm(super().tables(keys), keys) | {"placement": "output"}

    def slides(self, layer: int, keys: dict[str, Any]) -> bool:
        pattern = keys["sliding_window_pattern"]
        if isinstance(pattern, str):
            return pattern[layer % len(pattern)] == "L" and layer + 1 < keys["num_hidden_layers"]
        return bool(pattern) and super().slides(layer, keys)

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        positions = super().positions(keys)
        if keys.get("sliding_window") is None:
            return positions
        still = [layer for layer, kind in enumerate(self.types(keys)) if kind == "full_attention"]
        return positions | ({"unturned_layers": still} if still else {})
