"""Qwen3-Next and Qwen3.5, text only: gated attention in every fourth layer, the gated delta rule in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config import choices
from residua.config.model import ModelConfig, head_dim
from residua.convert.family import Family, Names, mixer_of
from residua.convert.layouts import KERNELS, ROWS, Layout, by_head, reordered
from residua.convert.mixture import SharedExpert
from residua.convert.positions import LINEAR
from residua.errors import UserError

DELTA_EPS = choices.RMSNorm().eps
"""The eps of Residua's norm on the delta rule's output; transformers uses the model's eps there."""


class GatedHybrid(Family):
    """The base: gains stored minus one, partly rotated heads, queries stored with their gates."""

    partial = less_one = True
    ACTS: ClassVar[dict[str, str]] = {"silu": "swiglu", "swish": "swiglu"}  # also of the delta rule's convolution
    MIXERS = (choices.SoftmaxAttention, choices.GatedDeltaNet)
    BIAS = ("attention_bias", "all")
    QK_NORM = "rms"
    OTHER = LINEAR
    EVERY = "full_attention_interval"
    WINDOWS = ("layer_types",)
    HELD_BY = Family.HELD_BY | {
        "linear.key_heads": ("linear_num_key_heads",),
        "linear.value_heads": ("linear_num_value_heads",),
        "linear.head_dim": ("linear_key_head_dim", "linear_value_head_dim"),
        "linear.convolution": ("linear_conv_kernel_dim",),
    }
    SETTINGS = Family.SETTINGS | {"attention.gate": "elementwise", "linear.kind": "gated_deltanet"}
    DEFAULTS = Family.DEFAULTS | {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    OTHER_ATTENTION: ClassVar[Names] = {
        "norm.weight": ("input_layernorm.weight",),
        "body.project.weight": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
        "body.gates.weight": ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"),
        "body.convolve.weight": ("linear_attn.conv1d.weight",),
        "body.A_log": ("linear_attn.A_log",),
        "body.dt_bias": ("linear_attn.dt_bias",),
        "body.norm.weight": ("linear_attn.norm.weight",),
        "body.out.weight": ("linear_attn.out_proj.weight",),
    }
    LAYOUTS: ClassVar[dict[str, Layout]] = {"convolve.weight": KERNELS}

    def settings(self, keys: dict[str, Any]) -> dict[str, Any]:
        if LINEAR in self.types(keys):
            if keys["linear_key_head_dim"] != keys["linear_value_head_dim"]:
                raise UserError("linear_key_head_dim and linear_value_head_dim differ, which is not supported.")
            if keys["rms_norm_eps"] != DELTA_EPS:
                raise UserError(
                    f"rms_norm_eps = {keys['rms_norm_eps']}: only {DELTA_EPS} is supported in the output norm of the "
                    "delta rule."
                )
        return super().settings(keys)

    def has_attention(self, config: ModelConfig) -> bool:
        return config.softmax is not None and super().has_attention(config)

    def layout(self, name: str, config: ModelConfig, keys: Mapping[str, Any]) -> Layout:
        if ".body.project." in name or ".body.gates." in name:
            mixer = mixer_of(name, config)
            if isinstance(mixer, choices.SoftmaxAttention):
                return _gated_queries(mixer, self.head_order(head_dim(config), config))
            assert isinstance(mixer, choices.GatedDeltaNet)
            return self.delta_layout(name, mixer)
        return super().layout(name, config, keys)

    def delta_layout(self, name: str, delta: choices.GatedDeltaNet) -> Layout:
        """The layout of the delta rule's projections: theirs fuses queries, keys and values, and separates gates."""
        if ".body.gates." in name:
            return ROWS
        keys, values = delta.key_heads * delta.head_dim, delta.value_heads * delta.head_dim
        return reordered(torch.arange(2 * keys + 2 * values), (2 * keys + values, values))


def _gated_queries(softmax: choices.SoftmaxAttention, order: Tensor) -> Layout:
    """Theirs stores each head's query followed by its gate; ours stores all gates after the values."""
    heads, kv, width = softmax.heads, softmax.kv_heads or softmax.heads, len(order)
    rows = by_head((heads, kv, kv), (torch.cat([order, width + torch.arange(width)]), order, torch.arange(width)))
    first = rows[: 2 * heads * width].unflatten(0, (heads, 2, width))
    ordered = torch.cat([first[:, 0].flatten(), rows[2 * heads * width :], first[:, 1].flatten()])
    return reordered(ordered, (2 * heads * width, kv * width, kv * width))


class Qwen3_5(GatedHybrid, model_type="qwen3_5_text"):
    """Qwen3.5, text only: gated attention in every fourth layer, the gated delta rule in the others."""


class Qwen3_5Moe(GatedHybrid, SharedExpert, model_type="qwen3_5_moe_text"):
    """Qwen3.5 with experts, text only: the layers of Qwen3-Next, projections stored apart."""

    ABSENT: ClassVar[tuple[str, ...]] = ("norm_topk_prob",)
    HELD_BY = GatedHybrid.HELD_BY | SharedExpert.HELD_BY
    SETTINGS = GatedHybrid.SETTINGS | SharedExpert.SETTINGS
    DEFAULTS = GatedHybrid.DEFAULTS | {
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "norm_topk_prob": True,
    }


class Qwen3Next(Qwen3_5Moe, model_type="qwen3_next"):
    """Qwen3-Next: gated attention, the gated delta rule, experts and a gated shared one in every layer."""

    ABSENT = ()
    DEFAULTS = Qwen3_5Moe.DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10}
    OTHER_ATTENTION = GatedHybrid.OTHER_ATTENTION | {
        "body.project.weight": ("linear_attn.in_proj_qkvz.weight",),
        "body.gates.weight": ("linear_attn.in_proj_ba.weight",),
    }

    def delta_layout(self, name: str, delta: choices.GatedDeltaNet) -> Layout:
        """Theirs stores each key head with the value heads that use it, and β before the decay."""
        served = delta.value_heads // delta.key_heads
        gates, width = ".body.gates." in name, delta.head_dim
        parts = [served, served] if gates else [width, width, served * width, served * width]
        rows = torch.arange(delta.key_heads * sum(parts)).unflatten(0, (delta.key_heads, -1))
        by_part = [part.flatten() for part in rows.split(parts, 1)]
        return reordered(torch.cat(by_part[::-1] if gates else by_part))
