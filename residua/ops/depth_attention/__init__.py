"""Attention over depth: h = Σ softmax(w · RMS(v_i)) v_i."""

from residua.ops._runtime.backend import Operator
from residua.ops.depth_attention import fused, reference
from residua.ops.depth_attention.reference import attend_finished, attend_partial

depth_attention = Operator(reference.depth_attention)
depth_attention.register_fused(fused.attend, fused.serves)

__all__ = ["attend_finished", "attend_partial", "depth_attention"]
