"""The delta rule with a decay per channel: the linear attention of Kimi Linear."""

from residua.ops._runtime.backend import Operator
from residua.ops.kimi_delta import reference
from residua.ops.kimi_delta.reference import step

kimi_delta = Operator(reference.chunked)
kimi_delta.__name__ = "kimi_delta"

__all__ = ["kimi_delta", "step"]
