"""The additions beside a norm, computed by its kernels.

To `torch.compile` the fused norm is a closed operator, so that what stands next to it becomes kernels of its own: the
sum that it reads in the forward pass (x' = x + y), and in the backward pass the sum of its gradient with that of the
residual path (g_x + g). Both are passes over tensors that the norm's kernels have in their hands anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from residua.ops._runtime import fused
from residua.train.compile.rewrites.graphs import VIEWS, call, erase, like, replace_outputs, source, value

aten = torch.ops.aten


class Norm(NamedTuple):
    """The operators of a norm: x and weights in, the normed rows first; with an addition x, update and weights in."""

    forward: OpOverload
    forward_added: OpOverload
    added: int
    """Which output of it is the sum."""
    backward: OpOverload
    residual: int
    """Which argument of it is the other path's gradient; the first output is that of x."""


def _norms() -> Iterator[Norm]:
    import residua.ops.gated_norm.autograd
    import residua.ops.rms_norm.autograd  # noqa: F401  (both register operators)

    ours = torch.ops.residua
    yield Norm(ours.gated_norm.default, ours.gated_norm_added.default, 4, ours.gated_norm_backward.default, 8)
    yield Norm(ours.rms_norm.default, ours.rms_norm_added.default, 2, ours.rms_norm_backward.default, 4)


def fuse_additions(graph: Graph) -> None:
    """Give the norms of a graph of aten operators, forward or backward, the additions next to them.

    An addition is taken if it is one of two tensors of equal shape and dtype, and neither of them the result of
    elementwise work that would be computed within the addition. Everything else stays as it is.
    """
    if not fused.INSTALLED:
        return
    for norm in _norms():
        for node in graph.find_nodes(op="call_function", target=norm.forward):
            _fuse_forward(graph, node, norm)
        for node in graph.find_nodes(op="call_function", target=norm.backward):
            _fuse_backward(graph, node, norm)


def _fuse_forward(graph: Graph, old: Node, norm: Norm) -> None:
    """norm(a + b) becomes one operator where the sum stood; who else reads the sum reads its own output."""
    rows, *weights = old.args
    total = source(rows)
    if not _is_plain_sum(total):
        return
    place = _last(total, weights)
    if any(reader <= place for reader in total.users):
        return
    with graph.inserting_before(place.next):
        operands = [like(graph, a, rows) for a in total.args]
        new = call(graph, norm.forward_added, *operands, *weights)
        replace_outputs(graph, old, new)
        added = like(graph, call(graph, getitem, new, norm.added), total)
    total.replace_all_uses_with(added)
    erase(graph, *old.users, old, total)


def _fuse_backward(graph: Graph, old: Node, norm: Norm) -> None:
    """g_x + g becomes an operator that is also given g, below where g is computed."""
    g_x = next((item for item in old.users if item.args[1] == 0), None)
    total = None if g_x is None else _only_reader(g_x)
    if total is None or len(old.args) > norm.residual or not _is_plain_sum(total):
        return
    g = [origin for origin in map(source, total.args) if origin is not g_x]
    place = _last(old, g)
    if len(g) != 1 or any(r <= place for item in old.users if item is not g_x for r in item.users):
        return
    with graph.inserting_before(place.next):
        new = call(graph, norm.backward, *old.args, like(graph, g[0], g_x))
        outputs = replace_outputs(graph, old, new)
        summed = like(graph, outputs[0], total)
    total.replace_all_uses_with(summed)
    erase(graph, total, *old.users, old)


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
