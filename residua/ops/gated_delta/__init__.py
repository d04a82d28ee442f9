"""The gated delta rule: linear attention with a decaying state that is corrected, not only added to."""

from residua.ops.backend import Operator
from residua.ops.gated_delta import reference
from residua.ops.gated_delta.reference import begins, step

gated_delta = Operator(reference.chunked)
gated_delta.__name__ = "gated_delta"

__all__ = ["begins", "gated_delta", "step"]
