"""The numerics of depth. Each operator has a plain PyTorch reference, which defines it; most have a fused twin.

`ops` imports nothing else from Residua, so you can use the operators alone.
"""

from residua.ops._runtime.backend import backend, chosen_backend
from residua.ops._runtime.numeric import rms
from residua.ops.delta_rule import delta_mixer, gated_delta, kimi_delta
from residua.ops.depth_attention import depth_attention
from residua.ops.expert_ffn import expert_ffn
from residua.ops.expert_routing import Routed, route
from residua.ops.gated_norm import gate_scores, gated_norm, low_rank_gate
from residua.ops.gated_output import gated_output
from residua.ops.grouped_linear import grouped_linear
from residua.ops.hyper_connection import hyper_step, single_pass_step, sinkhorn
from residua.ops.linear_cross_entropy import linear_cross_entropy, training_cross_entropy
from residua.ops.mix_projection import Sections, mix_heads, mix_projection
from residua.ops.multi_gate import (
    gates,
    multi_gate,
    multi_gate_chain,
    multi_gate_inverted,
    pool,
    pool_streams,
    pool_weights,
)
from residua.ops.norm_rotate import norm_rotate, rotate
from residua.ops.rms_norm import add_norm, rms_norm
from residua.ops.short_convolution import convolve_heads
from residua.ops.squared_relu import squared_relu_ffn
from residua.ops.symmetric_product import symmetric_product

__all__ = [
    "Routed",
    "Sections",
    "add_norm",
    "backend",
    "chosen_backend",
    "convolve_heads",
    "delta_mixer",
    "depth_attention",
    "expert_ffn",
    "gate_scores",
    "gated_delta",
    "gated_norm",
    "gated_output",
    "gates",
    "grouped_linear",
    "hyper_step",
    "kimi_delta",
    "linear_cross_entropy",
    "low_rank_gate",
    "mix_heads",
    "mix_projection",
    "multi_gate",
    "multi_gate_chain",
    "multi_gate_inverted",
    "norm_rotate",
    "pool",
    "pool_streams",
    "pool_weights",
    "rms",
    "rms_norm",
    "rotate",
    "route",
    "single_pass_step",
    "sinkhorn",
    "squared_relu_ffn",
    "symmetric_product",
    "training_cross_entropy",
]
