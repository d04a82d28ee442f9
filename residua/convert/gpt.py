"""Families with LayerNorm: GPT-2, GPT-NeoX and those after them. transformers is the reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config.model import ModelConfig, head_dim
from residua.convert.family import PLAIN, Family, Names, Rule, alike, plain_kind, register
from residua.convert.layouts import Layout, Ones, Packed, Reordered, Transposed, turned_order
from residua.convert.llama import query_key_order
from residua.convert.positions import turned_width


class LayerNormed(Family):
    """LayerNorm in place of RMSNorm; `EPS` is its key, `PARAMETERS` what it has."""

    EPS: ClassVar[str] = "layer_norm_eps"
    PARAMETERS: ClassVar[str] = "gain_and_bias"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**Family.DEFAULTS, "layer_norm_eps": 1e-5}
    TOP: ClassVar[Names] = {**Family.TOP, **alike("norm", "model.norm")}
    ATTENTION: ClassVar[Names] = {**Family.ATTENTION, **alike("norm", "input_layernorm")}

    def norm(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "layernorm", "eps": keys[self.EPS], "parameters": self.PARAMETERS}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        keys = super().keys(config)
        return keys | {self.EPS: keys.pop("rms_norm_eps")}


class PlainFeedForwards(LayerNormed):
    """Feed-forwards without a gate, and biases everywhere."""

    ACTS: ClassVar[Mapping[str, str]] = PLAIN

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        if self.BIAS is None:
            tables["attention"]["bias"] = "all"
        return tables

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"kind": plain_kind(keys["hidden_act"]), "hidden": keys["intermediate_size"], "bias": True}

    def is_left_out(self, tensor: str, config: ModelConfig) -> bool:
        """Masks that old versions of transformers wrote."""
        return re.fullmatch(r"\w+\.(h|layers)\.\d+\.(attn|attention)\.(masked_)?bias", tensor) is not None


@register
class Olmo(LayerNormed):
    """OLMo 1: LayerNorm without parameters; models that clip queries, keys and values are refused."""

    model_type = "olmo"
    architecture = "OlmoForCausalLM"
    PARAMETERS = "none"
    BIAS = ("attention_bias", "all")
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"clip_qkv": ()}

    def norm(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().norm(keys | {"layer_norm_eps": 1e-5})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return super().keys(config) | {"clip_qkv": None}


@register
class Starcoder2(PlainFeedForwards):
    """StarCoder 2: LayerNorm, plain feed-forwards, biases unless switched off, a window in every layer or none."""

    model_type = "starcoder2"
    architecture = "Starcoder2ForCausalLM"
    EPS = "norm_epsilon"
    BIAS = ("use_bias", "all")
    WINDOWS = ("sliding_window",)
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_bias": True,
    }
    FEED_FORWARD: ClassVar[Names] = {
        **alike("norm", "post_attention_layernorm"),
        **alike("body.up", "mlp.c_fc"),
        **alike("body.out", "mlp.c_proj"),
    }

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        tables = super().tables(keys)
        tables["ffn"]["bias"] = keys["use_bias"]
        return tables


@register
class GPT2(PlainFeedForwards):
    """GPT-2: LayerNorm, learned positions and no others, plain feed-forwards, biases everywhere."""

    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    BODY = "transformer."
    LAYERS = "h"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **LayerNormed.DEFAULTS,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    NAMES: ClassVar[Mapping[str, str]] = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    ABSENT = ("num_key_value_heads", "head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    TOP: ClassVar[Names] = {
        "embed.weight": ("transformer.wte.weight",),
        "places.weight": ("transformer.wpe.weight",),
        **alike("norm", "transformer.ln_f"),
        "unembed.weight": ("lm_head.weight",),
    }
    ATTENTION: ClassVar[Names] = {
        **alike("norm", "ln_1"),
        **alike("body.project", "attn.c_attn"),
        **alike("body.out", "attn.c_proj"),
    }
    FEED_FORWARD: ClassVar[Names] = {
        **alike("norm", "ln_2"),
        **alike("body.up", "mlp.c_fc"),
        **alike("body.out", "mlp.c_proj"),
    }
    LAYOUTS: ClassVar[Mapping[str, Layout]] = {
        **dict.fromkeys(("project.weight", "up.weight", "out.weight"), Transposed()),
        "project.bias": Packed(),
    }

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        usual = {self.NAMES.get(key, key): value for key, value in keys.items() if key not in self.ABSENT}
        return usual | {"intermediate_size": usual.get("intermediate_size") or 4 * usual.get("hidden_size", 0)}

    def read(self, keys: Mapping[str, Any]) -> ModelConfig:
        return super().read(self.spelled(dict(keys)))

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        places = keys["max_position_embeddings"]
        return super().tables(keys) | {"learned_positions": places, "context": keys.get("n_ctx") or places}

    def positions(self, keys: dict[str, Any]) -> dict[str, Any]:
        return {"unturned_layers": list(range(keys["num_hidden_layers"]))}

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        usual = super().keys(config) | {"max_position_embeddings": config.learned_positions or config.context}
        theirs = {name: key for key, name in self.NAMES.items()}
        keys = {theirs.get(key, key): value for key, value in usual.items() if key not in self.ABSENT}
        return keys | {"n_ctx": config.context}


@register
class GPTNeoX(PlainFeedForwards):
    """GPT-NeoX and Pythia: LayerNorm, parallel sublayers unless switched off, heads that turn in part, biases."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    BODY = "gpt_neox."
    BIAS = ("attention_bias", "all")
    partial = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **LayerNormed.DEFAULTS,
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
    }
    NAMES: ClassVar[Mapping[str, str]] = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    TOP: ClassVar[Names] = {
        "embed.weight": ("gpt_neox.embed_in.weight",),
        **alike("norm", "gpt_neox.final_layer_norm"),
        "unembed.weight": ("embed_out.weight",),
    }
    ATTENTION: ClassVar[Names] = {
        **alike("norm", "input_layernorm"),
        **alike("body.project", "attention.query_key_value"),
        **alike("body.out", "attention.dense"),
    }
    FEED_FORWARD: ClassVar[Names] = {
        **alike("norm", "post_attention_layernorm"),
        **alike("body.up", "mlp.dense_h_to_4h"),
        **alike("body.out", "mlp.dense_4h_to_h"),
    }

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        absent = ("num_key_value_heads", "head_dim")
        return {self.NAMES.get(key, key): value for key, value in keys.items() if key not in absent}

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | ({"topology": {"kind": "parallel"}} if keys["use_parallel_residual"] else {})

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        return self.spelled(super().keys(config) | {"use_parallel_residual": config.topology.kind == "parallel"})

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        """Theirs has queries, keys and values of one head after another."""
        if ".body.project." not in name or config.softmax is None:
            return super().layout(name, config, keys)
        width = head_dim(config)
        rows = torch.arange(3 * config.softmax.heads * width).view(-1, 3, width).transpose(0, 1)
        order = turned_order(width, turned_width(config))
        return Reordered(torch.cat([rows[:2, :, order].flatten(), rows[2].flatten()]), (rows.numel(),))


class HeadWithBias(Rule):
    """W' of a head (W, b) behind a LayerNorm with gain g and bias β, where our norm has gains and biases of 1.

    A LayerNorm without parameters gives x with Σ x = 0. So W' = W diag(g) + c 1ᵀ gives W'(x + 1) = W(g ⊙ x + β) + b
    for c = (W β + b − W g) / C: the head takes in its bias without a parameter for it.
    """

    @property
    def exact(self) -> bool:
        return False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from zip(self.theirs, (self.shape, self.shape[:1]), strict=True)

    def read(self, parts: list[Tensor]) -> Tensor:
        weight, bias, *norm = (part.double() for part in parts)
        gain, shift = norm or (weight.new_ones(weight.shape[1]),) * 2
        constant = (weight @ (shift - gain) + bias) / weight.shape[1]
        return (weight * gain + constant[:, None]).float()

    def write(self, parameter: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.theirs, (parameter, parameter.new_zeros(len(parameter))), strict=True))


class SharedNorm(Family):
    """Parallel sublayers that read the output of one norm; ours has a norm for each."""

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | {"topology": {"kind": "parallel"}}


@register
class Phi(SharedNorm, PlainFeedForwards):
    """Phi 1 to 2: parallel sublayers with one LayerNorm, heads that turn in part, biases, also on logits."""

    model_type = "phi"
    architecture = "PhiForCausalLM"
    partial = True
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **LayerNormed.DEFAULTS,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {"qk_layernorm": (False,), "tie_word_embeddings": (False,)}
    TOP: ClassVar[Names] = {**Family.TOP, **alike("norm", "model.final_layernorm")}
    ATTENTION: ClassVar[Names] = {**LayerNormed.ATTENTION, **alike("body.out", "self_attn.dense")}
    FEED_FORWARD: ClassVar[Names] = {
        **alike("norm", "input_layernorm"),
        **alike("body.up", "mlp.fc1"),
        **alike("body.out", "mlp.fc2"),
    }

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if name in ("norm.weight", "norm.bias"):
            return Ones()
        return Reordered(query_key_order(config)) if ".body.project." in name else super().layout(name, config, keys)

    def rules(self, config: ModelConfig, keys: Mapping[str, Any]) -> Iterator[Rule]:
        norm = self.TOP["norm.weight"] + self.TOP["norm.bias"]
        for rule in super().rules(config, keys):
            if rule.ours != "unembed.weight":
                yield rule
                continue
            yield HeadWithBias(rule.ours, rule.shape, ("lm_head.weight", "lm_head.bias"), (), also=norm)
