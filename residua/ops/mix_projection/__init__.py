"""Mixing of a layer's projection with an anchor projection."""

from residua.ops.backend import Operator
from residua.ops.mix_projection import reference
from residua.ops.mix_projection.reference import per_head

mix_projection = Operator(reference.mix_projection)

__all__ = ["mix_projection", "per_head"]
