"""Tables of rotary positions, one opaque call each when compiled.

Fused into its readers by the compiler, the powers and cosines were computed per element and layer and took an eighth of
the training step.
"""

from residua.ops._runtime.backend import Operator
from residua.ops.rotary_table import autograd, reference

rotary_table = Operator(reference.rotary_table)
rotary_table.register_fused(autograd.rotary_table, lambda *_: True)
scaled_rotary_table = Operator(reference.scaled_rotary_table)
scaled_rotary_table.register_fused(autograd.scaled_rotary_table, lambda *_: True)

__all__ = ["rotary_table", "scaled_rotary_table"]
