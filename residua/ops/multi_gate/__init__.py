"""Multi-Gate Residuals: gated write into n streams and attention pool, in one operator."""

from residua.ops.backend import Operator
from residua.ops.multi_gate import reference
from residua.ops.multi_gate.reference import gates, pool, pool_weights

multi_gate = Operator(reference.multi_gate)

__all__ = ["gates", "multi_gate", "pool", "pool_weights"]
