"""Kimi Linear: a hybrid of delta attention and latent attention, with experts after the first layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from residua.config import choices
from residua.config.model import ModelConfig
from residua.convert.family import Family, Names, alike, register
from residua.convert.layouts import Layout
from residua.convert.mixture import Mixture
from residua.errors import UserError

SPELLINGS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names in the published config.json to those that transformers also takes."""
LINEAR_SPELLINGS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The same for the keys of its linear_attn_config."""


class Kernels(Layout):
    """Convolutions: theirs [channels, 1, taps], the oldest token first; ours [taps, channels], the newest first."""

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (parameter.shape[1] // count,) * count if count else ()

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return rows, 1, ours[0]

    def read(self, stacked: Tensor) -> Tensor:
        return stacked.squeeze(1).flip(-1).T.contiguous()

    def write(self, parameter: Tensor) -> Tensor:
        return parameter.T.flip(-1).unsqueeze(1).contiguous()


class Rates(Layout):
    """Decay rates: theirs [1, 1, heads, 1], ours [heads]."""

    def rows(self, parameter: Tensor, parts: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (1,)

    def shape(self, rows: int, ours: tuple[int, ...]) -> tuple[int, ...]:
        return 1, 1, ours[0], 1

    def read(self, stacked: Tensor) -> Tensor:
        return stacked.flatten()

    def write(self, parameter: Tensor) -> Tensor:
        return parameter.view(1, 1, -1, 1)


class SigmoidMixture(Mixture):
    """Experts chosen by sigmoid scores with a bias, a shared one, dense first layers (DeepSeek-V3)."""

    EXPERTS: ClassVar[tuple[str, ...]] = ("num_local_experts",)
    HIDDEN = "moe_intermediate_size"
    ROUTER: ClassVar[str] = "sigmoid_scores"

    def feed_forward(self, keys: dict[str, Any]) -> dict[str, Any]:
        dense = self._dense_layers(keys)
        return super().feed_forward(keys) | {
            "shared": keys["n_shared_experts"],
            "router": {"kind": self.ROUTER, "scale": keys["routed_scaling_factor"], **self._groups(keys)},
            "dense_layers": dense,
            **({"dense_hidden": keys["intermediate_size"]} if dense else {}),
        }

    def _groups(self, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys of the groups of experts."""
        return {"groups": keys.get("n_group") or 1, "top_groups": keys.get("topk_group") or 1}

    def _dense_layers(self, keys: dict[str, Any]) -> int:
        types = keys.get("mlp_layer_types")
        if types is None:
            return int(keys["first_k_dense_replace"])
        dense = types.count("dense")
        if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            raise UserError("mlp_layer_types has a dense layer after one with experts, which is missing here.")
        return int(dense)

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        ffn = config.ffn
        assert isinstance(ffn, choices.MoE)
        return super().keys(config) | {
            "intermediate_size": ffn.at(0).hidden,
            "n_shared_experts": ffn.shared,
            "routed_scaling_factor": ffn.router.scale,
            "n_group": ffn.router.groups,
            "topk_group": ffn.router.top_groups,
        }


def latent_table(keys: dict[str, Any], positions: dict[str, Any]) -> dict[str, Any]:
    """The table of latent attention."""
    if keys.get("num_key_value_heads") not in (None, keys["num_attention_heads"]):
        raise UserError(f"num_key_value_heads = {keys['num_key_value_heads']} differs from num_attention_heads.")
    latent = {
        "kind": "mla",
        "heads": keys["num_attention_heads"],
        "head_dim": keys["qk_nope_head_dim"],
        "value_dim": keys["v_head_dim"],
        "shared_dim": keys["qk_rope_head_dim"],
        "rank": keys["kv_lora_rank"],
        **positions,
    }
    return latent if keys.get("q_lora_rank") is None else latent | {"query_rank": keys["q_lora_rank"]}


def latent_keys(latent: choices.LatentAttention) -> dict[str, Any]:
    """The keys of latent attention."""
    return {
        "num_attention_heads": latent.heads,
        "num_key_value_heads": latent.heads,
        "qk_nope_head_dim": latent.head_dim,
        "v_head_dim": latent.value_width,
        "qk_rope_head_dim": latent.shared_dim,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
    }


@register
class KimiLinear(SigmoidMixture):
    """Kimi Linear: delta and latent attention without positions, sigmoid scores, dense first layers."""

    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        **Family.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    }
    UNKNOWN: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "attention_bias": (False,),
        "mla_use_nope": (True,),
        "moe_router_activation_func": ("sigmoid",),
        "moe_layer_freq": (1,),
        "num_nextn_predict_layers": (0,),
    }
    DELTA: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        "body.project.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "body.gates.weight": ("self_attn.b_proj.weight", "self_attn.f_a_proj.weight", "self_attn.g_a_proj.weight"),
        "body.decay.weight": ("self_attn.f_b_proj.weight",),
        "body.gate.weight": ("self_attn.g_b_proj.weight",),
        "body.convolve.weight": tuple(f"self_attn.{name}_conv1d.weight" for name in "qkv"),
        "body.A_log": ("self_attn.A_log",),
        "body.dt_bias": ("self_attn.dt_bias",),
        "body.norm.weight": ("self_attn.o_norm.weight",),
        "body.out.weight": ("self_attn.o_proj.weight",),
    }
    LATENT: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        "body.project.weight": ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
        "body.norm.weight": ("self_attn.kv_a_layernorm.weight",),
        "body.expand.weight": ("self_attn.kv_b_proj.weight",),
        "body.out.weight": ("self_attn.o_proj.weight",),
        "body.query_norm.weight": ("self_attn.q_a_layernorm.weight",),
        "body.query.weight": ("self_attn.q_b_proj.weight",),
    }
    FEED_FORWARD: ClassVar[Names] = {
        **Family.FEED_FORWARD,
        "body.router.weight": ("block_sparse_moe.gate.weight",),
        "body.router.bias": ("block_sparse_moe.gate.e_score_correction_bias",),
        "body.experts.up": ("block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"),
        "body.experts.out": ("block_sparse_moe.experts.{e}.w2.weight",),
        **alike(
            "body.shared.gate_up",
            "block_sparse_moe.shared_experts.gate_proj",
            "block_sparse_moe.shared_experts.up_proj",
        ),
        **alike("body.shared.out", "block_sparse_moe.shared_experts.down_proj"),
    }
    LAYOUTS: ClassVar[Mapping[str, Layout]] = {"convolve.weight": Kernels(), "A_log": Rates()}

    def spelled(self, keys: dict[str, Any]) -> dict[str, Any]:
        usual = {SPELLINGS.get(key, key): value for key, value in keys.items()}
        linear = usual.pop("linear_attn_config", None)
        if not isinstance(linear, dict):
            return usual
        usual |= {new: linear[old] for old, new in LINEAR_SPELLINGS.items() if old in linear}
        full = linear.get("full_attn_layers")
        if isinstance(full, list) and isinstance(layers := usual.get("num_hidden_layers"), int):
            # layers are counted from 1 there
            usual["layer_types"] = [_TYPES[layer + 1 in full] for layer in range(layers)]
        return usual

    def named(self, tensor: str) -> str:
        """transformers saves dense layers as if they had experts."""
        return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", tensor)

    def tables(self, keys: dict[str, Any]) -> dict[str, Any]:
        return super().tables(keys) | {"attention": self._attention(keys)}

    def _attention(self, keys: dict[str, Any]) -> dict[str, Any]:
        latent = latent_table(keys, {"positions": "none"})
        delta = {
            "kind": "kimi_delta",
            "heads": keys["linear_num_heads"],
            "head_dim": keys["linear_head_dim"],
            "convolution": keys["linear_conv_kernel_dim"],
            "eps": keys["rms_norm_eps"],
        }
        full = self._full_layers(keys)
        if not full or len(full) == keys["num_hidden_layers"]:
            return latent if full else delta
        return {"kind": "hybrid", "softmax_layers": full, "softmax": latent, "linear": delta}

    def _full_layers(self, keys: dict[str, Any]) -> list[int]:
        derived = [_TYPES[bool(layer) and layer % 4 == 0] for layer in range(keys["num_hidden_layers"])]
        types = keys.get("layer_types") or derived
        if unknown := set(types) - set(_TYPES.values()):
            raise UserError(f"layer_types contains {sorted(unknown)[0]!r}, a kind of layer that is missing here.")
        return [layer for layer, name in enumerate(types) if name == _TYPES[True]]

    def has_attention(self, config: ModelConfig) -> bool:
        linear = config.linear
        latent = len(config.softmax_layers) if config.latent is not None else 0
        delta = config.layers - len(config.softmax_layers) if isinstance(linear, choices.KimiDelta) else 0
        return latent + delta == config.layers

    def keys(self, config: ModelConfig) -> dict[str, Any]:
        layers, dense = range(config.layers), config.layers - config.ffn.mixtures(config.layers)
        return super().keys(config) | {"mlp_layer_types": ["dense" if n < dense else "sparse" for n in layers]}

    def attention_keys(self, config: ModelConfig) -> dict[str, Any]:
        linear = config.linear
        keys: dict[str, Any] = {"num_attention_heads": 1} if config.latent is None else latent_keys(config.latent)
        keys["layer_types"] = [_TYPES[layer in config.softmax_layers] for layer in range(config.layers)]
        if isinstance(linear, choices.KimiDelta):
            keys |= {
                "linear_num_heads": linear.heads,
                "linear_head_dim": linear.head_dim,
                "linear_conv_kernel_dim": linear.convolution,
            }
        return keys

    def of_mixer(self, layer: int, config: ModelConfig) -> Names:
        if layer not in config.softmax_layers:
            return self.DELTA
        if config.latent is None or config.latent.query_rank is None:
            return self.LATENT
        first = {"body.project.weight": ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")}
        return {**self.LATENT, **first}


_TYPES = {True: "full_attention", False: "linear_attention"}
