"""GatedNorm: RMSNorm followed by a low-rank gate computed from its own output.

A step of S with GatedNorm takes 1.028 times a plain one. The paper's compiled code took 1.075 in an earlier run
(docs/results/step.md, `residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare prenorm,gatednorm`).
"""

from typing import Any

from torch import Tensor

from residua.ops._runtime.backend import Operator
from residua.ops._runtime.cases import Case, Cases, Draw
from residua.ops._runtime.triton_support import supports
from residua.ops.gated_norm import launch, reference
from residua.ops.gated_norm.reference import gate_scores, low_rank_gate

HIGHEST_RANK = 64


def _serves(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, *, activation: str = "sigmoid", **_: Any) -> bool:
    """Supports one sigmoid per channel and a low rank."""
    per_channel = up.shape[0] == x.shape[-1] and activation == "sigmoid"
    return per_channel and down.shape[0] <= HIGHEST_RANK and supports(x, weight, down, up)


def _cases(d: Draw) -> Cases:
    rank, width = d.sizes.rank, d.sizes.width
    yield Case((d.x(), d.gain(), d.linear(rank, width), d.w(width, rank)), moved=(2, 3))


gated_norm = Operator(reference.gated_norm, _cases, launch.gated_norm, _serves, compile_seconds=6)

__all__ = ["gate_scores", "gated_norm", "low_rank_gate"]
