"""Helpers that rewrite a graph of torch operators in place, and the pass that hands rewrites to inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.torch_version import TorchVersion

Rewrite = Callable[[Graph], None]

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


class Rewrites(CustomGraphPass):
    """Applies the rewrites in turn. Inductor's cache key includes their source, so an edited rewrite takes effect."""

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
    """Register fallbacks for our operators before inductor meets them.

    Before torch 2.13, inductor logs the whole expression of an unknown operator's arguments. If two outputs of each
    operator feed the next one, that expression doubles with every layer, and compilation never finishes.
    """
    if TorchVersion(torch.__version__) >= TorchVersion("2.13"):
        return
    from torch._inductor import graph as inductor

    ours = {n.target for n in graph.nodes if isinstance(n.target, OpOverload) and n.target.namespace == "residua"}
    for operator in ours - set(inductor.lowerings):
        tag = inductor.get_layout_constraint_tag(operator, with_default=True)
        inductor.make_fallback(operator, inductor.tag_to_layout_constraint(tag), warn=False)


def call(graph: Graph, operator: Any, *args: Any) -> Node:
    """Insert a call at the graph's insertion point, with the shape and dtype of its result in `meta`."""
    node = graph.call_function(operator, args)
    node.meta["val"] = operator(*torch.fx.map_arg(args, lambda argument: argument.meta["val"]))
    return node


def value(node: object) -> torch.Tensor | None:
    """The fake tensor that a node computes (shape, dtype, device), or None if it computes something else."""
    tensor = node.meta.get("val") if isinstance(node, Node) else None
    return tensor if isinstance(tensor, torch.Tensor) else None


def source(node: Any) -> Node:
    """The node that a chain of views starts from."""
    while node.target in VIEWS:
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def like(graph: Graph, node: Any, other: Any) -> Node:
    """The node, viewed in the shape of `other`."""
    shape = other.meta["val"].shape
    return node if node.meta["val"].shape == shape else call(graph, aten.reshape.default, node, list(shape))


def replace_outputs(graph: Graph, old: Node, new: Node) -> dict[Any, Node]:
    """Redirect readers of each output of `old` to the same output of `new`."""
    outputs = {}
    for item in list(old.users):
        which = item.args[1]
        outputs[which] = call(graph, getitem, new, which)
        item.replace_all_uses_with(outputs[which])
    return outputs


def erase(graph: Graph, *nodes: Node) -> None:
    """Erase nodes that nothing reads, and the views that only they read."""
    for node in nodes:
        above = [n for n in node.all_input_nodes if n.target in VIEWS]
        graph.erase_node(node)
        erase(graph, *(n for n in above if not n.users))
