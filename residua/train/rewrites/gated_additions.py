"""The additions beside a GatedNorm, computed by its kernels.

To `torch.compile` the fused norm is a closed operator, so that what stands next to it becomes kernels of its own: the
sum that it reads in the forward pass (x' = x + y), and in the backward pass the sum of its gradient with that of the
residual path (g_x + g). Both are passes over tensors that the norm's kernels have in their hands anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from residua.ops import fused
from residua.train.rewrites.graphs import call, value

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
RESIDUAL = 8
"""Which argument of the backward operator is the other path's gradient."""


def fuse_additions(graph: Graph) -> None:
    """Give the GatedNorms of a graph of aten operators, forward or backward, the additions next to them.

    An addition is taken if it is one of two tensors of equal shape and dtype, and neither of them the result of
    elementwise work that would be computed within the addition. Everything else stays as it is.
    """
    if not fused.INSTALLED:
        return
    import residua.ops.gated_norm.triton  # noqa: F401  (registers the operators)

    operators = torch.ops.residua
    for norm in graph.find_nodes(op="call_function", target=operators.gated_norm.default):
        _fuse_forward(graph, norm)
    for backward in graph.find_nodes(op="call_function", target=operators.gated_norm_backward.default):
        _fuse_backward(graph, backward)


def _fuse_forward(graph: Graph, norm: Node) -> None:
    """norm(a + b) becomes one operator where the sum stood; who else reads the sum reads its last output."""
    rows, *weights = norm.args
    total = _source(rows)
    if not _is_plain_sum(total):
        return
    place = _last(total, weights)
    if any(reader <= place for reader in total.users):
        return
    with graph.inserting_before(place.next):
        operands = [_like(graph, a, rows) for a in total.args]
        new = call(graph, torch.ops.residua.gated_norm_added.default, *operands, *weights)
        _replace_outputs(graph, norm, new)
        added = _like(graph, call(graph, getitem, new, 4), total)
    total.replace_all_uses_with(added)
    _erase(graph, *norm.users, norm, total)


def _fuse_backward(graph: Graph, backward: Node) -> None:
    """g_x + g becomes an operator that is also given g, below where g is computed."""
    g_x = next((item for item in backward.users if item.args[1] == 0), None)
    total = None if g_x is None else _only_reader(g_x)
    if total is None or len(backward.args) > RESIDUAL or not _is_plain_sum(total):
        return
    g = [source for source in map(_source, total.args) if source is not g_x]
    place = _last(backward, g)
    if len(g) != 1 or any(r <= place for item in backward.users if item is not g_x for r in item.users):
        return
    with graph.inserting_before(place.next):
        new = call(graph, backward.target, *backward.args, _like(graph, g[0], g_x))
        outputs = _replace_outputs(graph, backward, new)
        summed = _like(graph, outputs[0], total)
    total.replace_all_uses_with(summed)
    _erase(graph, total, *backward.users, backward)


def _is_plain_sum(node: Node) -> bool:
    """Two tensors of the shape and dtype of their sum, both of which are in memory anyway."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    total, *operands = (value(n) for n in (node, *node.args))
    if total is None or not all(isinstance(size, int) for size in total.shape):
        return False
    alike = all(v is not None and v.shape == total.shape and v.dtype == total.dtype for v in operands)
    return alike and total.is_contiguous() and not any(_would_be_fused(a) for a in node.args)


def _would_be_fused(operand: Any) -> bool:
    """Whether it is elementwise work for one reader: `torch.compile` computes that within the addition, and cheaper."""
    while len(operand.users) == 1 and operand.target in VIEWS:
        operand = operand.args[0]
    return len(operand.users) == 1 and torch.Tag.pointwise in getattr(operand.target, "tags", ())


def _source(node: Any) -> Node:
    """What a chain of views is of."""
    while node.target in VIEWS:
        node = node.args[0]
    assert isinstance(node, Node)
    return node


def _only_reader(node: Node) -> Node | None:
    """Who reads it, through views, if that is one only."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in VIEWS:
            return node
    return None


def _last(node: Node, others: Iterable[Any]) -> Node:
    """Whichever of them comes last in the graph."""
    return max([node, *(n for n in others if isinstance(n, Node))])


def _like(graph: Graph, node: Any, other: Any) -> Node:
    """The node in the shape of another."""
    shape = other.meta["val"].shape
    return node if node.meta["val"].shape == shape else call(graph, aten.reshape.default, node, list(shape))


def _replace_outputs(graph: Graph, old: Node, new: Node) -> dict[Any, Node]:
    """Who reads an output of `old` reads that of `new`."""
    outputs = {}
    for item in list(old.users):
        which = item.args[1]
        outputs[which] = call(graph, getitem, new, which)
        item.replace_all_uses_with(outputs[which])
    return outputs


def _erase(graph: Graph, *nodes: Node) -> None:
    """Erase nodes that nothing reads, and the views that only they read."""
    for node in nodes:
        above = [n for n in node.all_input_nodes if n.target in VIEWS]
        graph.erase_node(node)
        _erase(graph, *(n for n in above if not n.users))
