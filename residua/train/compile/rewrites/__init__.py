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


def with_own_code(function: Any) -> Callable[..., Any]:
    """A function, one of many made by the same lines, that is to be compiled apart from the others.

    PyTorch keeps what it compiled with the code, counts it, and tries all of it, the most recent first, at every call:
    functions that take turns would always find theirs last.
    """
    function.__code__ = function.__code__.replace()
    own: Callable[..., Any] = function
    return own


def allow_recompiling(sublayers: int) -> None:
    """As often as there are sublayers, and a few times more.

    Where the compiler stops inside, at experts in a loop, all sublayers share the code of what it goes on with.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, sublayers + 8)


@cache
def _rewrites() -> Any:
    # inductor takes a second to import, and only those who compile need it
    from residua.train.compile.rewrites.graphs import Rewrites
    from residua.train.compile.rewrites.norm_additions import fuse_additions
    from residua.train.compile.rewrites.norm_dots import take_dots
    from residua.train.compile.rewrites.packed_heads import pack_head_gradients
    from residua.train.compile.rewrites.weight_gradients import split_weight_gradients

    return Rewrites(fuse_additions, take_dots, pack_head_gradients, split_weight_gradients)
