"""What a compiled training step does better once the whole graph is seen: rewrites of inductor's forward and backward.

The model is written for people, one module after another; some savings lie between modules, or between a module's
backward and the optimizer's buffers. Each rewrite is a function of a graph that leaves alone what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def compile_rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for fixed shapes, with all rewrites."""
    return torch.compile(function, dynamic=False, options={"post_grad_custom_pre_pass": _rewrites()})


@cache
def _rewrites() -> Any:
    # inductor takes a second to import, and only those who compile need it
    from residua.train.rewrites.graphs import Rewrites
    from residua.train.rewrites.norm_additions import fuse_additions
    from residua.train.rewrites.norm_dots import take_dots
    from residua.train.rewrites.packed_heads import pack_head_gradients
    from residua.train.rewrites.weight_gradients import split_weight_gradients

    return Rewrites(fuse_additions, take_dots, pack_head_gradients, split_weight_gradients)
