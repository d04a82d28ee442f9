"""GatedNorm: RMSNorm and a low-rank gate on its own output."""

from residua.ops.backend import Operator
from residua.ops.gated_norm import reference
from residua.ops.gated_norm.reference import low_rank_gate

gated_norm = Operator(reference.gated_norm)

__all__ = ["gated_norm", "low_rank_gate"]
