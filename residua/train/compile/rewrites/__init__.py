"""Rewrites of the graphs of a compiled training step, for savings that are visible only in the whole graph.

The model is written for readers, module by module. Some savings lie between modules, or between a module's backward
pass and the optimizer's buffers. A rewrite is a function of a graph; it changes only patterns that it recognizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

RECOMPUTE_GATES = "RESIDUA_RECOMPUTE_GATES"
"""The environment variable that, set to 1, turns on a rewrite that saves memory and costs time."""


def compile_rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` for fixed shapes, with all rewrites."""
    options = {"joint_custom_pre_pass": _joint_rewrites(), "post_grad_custom_pre_pass": _rewrites()}
    return torch.compile(function, dynamic=False, options=options)


def with_own_code(function: Any) -> Callable[..., Any]:
    """Give a closure its own code object, so that it is compiled separately from closures of the same source lines.

    PyTorch caches compiled versions per code object and tries them at every call, most recent first. Closures that
    alternate would always find their own version last, and would reach the recompile limit.
    """
    function.__code__ = function.__code__.replace()
    copy: Callable[..., Any] = function
    return copy


def allow_recompiling(sublayers: int) -> None:
    """Raise the recompile limit to the number of sublayers, plus a few.

    After a graph break inside a sublayer (experts in a loop), all sublayers share the resumed code object.
    """
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, sublayers + 8)


@cache
def _rewrites() -> Any:
    # inductor takes a second to import, and is needed only for compiling
    from residua.train.compile.rewrites.graphs import Rewrites
    from residua.train.compile.rewrites.norms import fuse_additions, take_dots
    from residua.train.compile.rewrites.packed_heads import pack_head_gradients
    from residua.train.compile.rewrites.weight_gradients import split_weight_gradients

    return Rewrites(fuse_additions, take_dots, pack_head_gradients, split_weight_gradients)


@cache
def _joint_rewrites() -> Any:
    """The rewrites of the joint graph, before it is divided into forward and backward."""
    from residua.train.compile.rewrites.gated_products import recompute_gated
    from residua.train.compile.rewrites.graphs import Rewrites
    from residua.train.compile.rewrites.normed_junctions import norm_in_junctions

    chosen = [recompute_gated] if os.environ.get(RECOMPUTE_GATES) == "1" else []
    return Rewrites(norm_in_junctions, *chosen)
