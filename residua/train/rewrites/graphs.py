"""Rewriting a graph of torch operators in place, and handing rewrites to inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.torch_version import TorchVersion

Rewrite = Callable[[Graph], None]


class Rewrites(CustomGraphPass):
    """Rewrites in turn. Compiled code is cached under their sources, so that a changed rewrite is never a stale one."""

    def __init__(self, *rewrites: Rewrite) -> None:
        self._rewrites = rewrites

    def __call__(self, graph: Graph) -> None:
        for rewrite in self._rewrites:
            rewrite(graph)
        graph.eliminate_dead_code()
        graph.lint()
        _announce_operators(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, *(inspect.getfile(rewrite) for rewrite in self._rewrites)))


def _announce_operators(graph: Graph) -> None:
    """Make inductor know the operators of a graph before it meets them.

    Before torch 2.13 it writes down, for a log that nobody reads, everything an unknown operator's arguments are made
    of. Where two outputs of each operator go into the next one, that doubles with every layer, and never ends.
    """
    if TorchVersion(torch.__version__) >= TorchVersion("2.13"):
        return
    from torch._inductor import graph as inductor

    ours = {n.target for n in graph.nodes if isinstance(n.target, OpOverload) and n.target.namespace == "residua"}
    for operator in ours - set(inductor.lowerings):
        tag = inductor.get_layout_constraint_tag(operator, with_default=True)
        inductor.make_fallback(operator, inductor.tag_to_layout_constraint(tag), warn=False)


def call(graph: Graph, operator: Any, *args: Any, **settings: Any) -> Node:
    """A new call at the graph's insertion point, its shape and dtype known as the other nodes' are."""
    node = graph.call_function(operator, args, settings)
    values, named = torch.fx.map_arg((args, settings), lambda argument: argument.meta["val"])
    node.meta["val"] = operator(*values, **named)
    return node


def value(node: object) -> torch.Tensor | None:
    """The shape, dtype and device of what a node computes, if it computes one tensor."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None
