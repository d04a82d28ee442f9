"""Let a junction of Multi-Gate Residuals norm what it hands to the next sublayer.

The junction's h is read by one norm alone, and in the backward pass the norm's gradient by that junction alone:

    rms_norm(multi_gate_forward(…)[0])                    =  multi_gate_normed_forward(…)[0]
    multi_gate_backward(rms_norm_backward(g, …)[0], …)    =  multi_gate_normed_backward(g, …)

Without h and its gradient, a junction and its norm move 5 of 5n + 10 rows less, and h is not kept. What is kept is
decided when the graph of both passes is divided, so this rewrite is of that joint graph, before it is divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from residua.ops._runtime import fused
from residua.train.compile.rewrites.graphs import VIEWS, call, like

aten, prims = torch.ops.aten, torch.ops.prims
SAME = (*VIEWS, aten.detach.default, aten.alias.default)
"""Operators that return the numbers they are given."""


class Found(NamedTuple):
    """A junction and the norm after it, forward and backward."""

    junction: Node
    norm: Node
    norm_backward: Node
    backward: Node


def norm_in_junctions(graph: Graph) -> None:
    """Replace every junction whose h only a plain norm reads, in a joint graph of forward and backward pass."""
    if not fused.INSTALLED:
        return
    import residua.ops.multi_gate.autograd
    import residua.ops.rms_norm.autograd  # noqa: F401  (both register operators)

    for junction in graph.find_nodes(op="call_function", target=torch.ops.residua.multi_gate_forward.default):
        found = _find(junction)
        if found is not None:
            hidden_stats = _replace_forward(graph, found)
            _replace_backward(graph, found, hidden_stats)


def _find(junction: Node) -> Found | None:
    ours = torch.ops.residua
    by_target = {reader.target: reader for reader in _readers(junction, 0)}
    if len(_readers(junction, 0)) != 2 or by_target.keys() != {ours.rms_norm.default, ours.rms_norm_backward.default}:
        return None
    norm, norm_backward = by_target[ours.rms_norm.default], by_target[ours.rms_norm_backward.default]
    ends = _readers(norm_backward, 0)
    if len(ends) != 1 or ends[0].target is not ours.multi_gate_backward.default:
        return None
    found = Found(junction, norm, norm_backward, ends[0])
    return found if _fits(found) else None


def _fits(found: Found) -> bool:
    """Whether the four belong together, none of them is checkpointed, and what they return is read late enough."""
    junction, norm, norm_backward, backward = found
    if len(norm_backward.args) != 4 or any("recompute" in node.meta for node in found):
        return False
    _, x, gain, rstd = norm_backward.args
    stats: Any = backward.args[4]
    together = (
        _is_output(norm.args[0], junction, 0)
        and _is_output(x, junction, 0)
        and gain is norm.args[1]
        and _is_output(rstd, norm, 1)
        and _readers(norm, 1) == [norm_backward]
        and _is_output(backward.args[0], norm_backward, 0)
        and _is_output(stats[-1], junction, 2)
    )
    written = [item for item in junction.users if item.args[1] != 0]
    g_gain = [item for item in norm_backward.users if item.args[1] == 1]
    return together and _follow(_place_forward(found), written) and _follow(_place_backward(found), g_gain)


def _place_forward(found: Found) -> Node:
    """The last node that the new forward call needs."""
    gain = found.norm.args[1]
    return max(n for n in (found.junction, gain) if isinstance(n, Node))


def _place_backward(found: Found) -> Node:
    """The last node that the new backward call needs, or the norm's backward, whichever is later."""
    return max(found.norm_backward, *(n for n in found.backward.all_input_nodes if n is not found.backward.args[0]))


def _follow(place: Node, items: Iterable[Node]) -> bool:
    """Whether everything that reads these nodes comes after `place`."""
    return all(reader > place for item in items for reader in item.users)


def _replace_forward(graph: Graph, found: Found) -> Node:
    """Returns the scalars of h, which the new backward call needs."""
    junction, norm, *_ = found
    *inputs, competitive, eps = junction.args
    _, gain, norm_eps = norm.args
    with _inserting(graph, _place_forward(found), junction):
        settings = (gain, competitive, eps, norm_eps)
        new = call(graph, torch.ops.residua.multi_gate_normed_forward.default, *inputs, *settings)
        made: dict[Any, Node] = {which: call(graph, getitem, new, which) for which in range(4)}
        for item in list(norm.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(like(graph, made[0], item))
        for item in list(junction.users):
            if item.args[1] != 0:
                item.replace_all_uses_with(made[item.args[1]])
    return made[3]


def _replace_backward(graph: Graph, found: Found, hidden_stats: Node) -> None:
    *_, norm_backward, backward = found
    g, _, gain, _ = norm_backward.args
    g_hidden, g_after, start, updates, stats, gate_query, pool_query, *settings = backward.args
    with _inserting(graph, _place_backward(found), backward):
        weights = (hidden_stats, gate_query, pool_query, gain)
        operator = torch.ops.residua.multi_gate_normed_backward.default
        new = call(graph, operator, like(graph, g, g_hidden), g_after, start, updates, stats, *weights, *settings)
        *_, old_row = backward.meta["val"]
        last, length = len(backward.meta["val"]) - 1, len(old_row)
        row = call(graph, getitem, new, last)
        for item in list(backward.users):
            ours = row if item.args[1] == last else call(graph, getitem, new, item.args[1])
            item.replace_all_uses_with(call(graph, aten.slice.Tensor, row, 0, 0, length) if ours is row else ours)
        for item in list(norm_backward.users):
            if item.args[1] == 1:
                width = item.meta["val"].shape[0]
                g_gain = call(graph, aten.slice.Tensor, row, 0, length, length + width)
                if item.meta["val"].dtype != old_row.dtype:
                    g_gain = call(graph, prims.convert_element_type.default, g_gain, item.meta["val"].dtype)
                item.replace_all_uses_with(g_gain)


@contextmanager
def _inserting(graph: Graph, place: Node, old: Node) -> Iterator[None]:
    """Insert after `place`. New nodes belong to the pass that `old` belongs to."""
    before = set(graph.nodes)
    with graph.inserting_before(place.next):
        yield
    tag = {k: v for k, v in old.meta.items() if k == "partitioner_tag"}
    for node in graph.nodes:
        if node not in before:
            node.meta.update(tag)


def _readers(node: Node, which: int) -> list[Node]:
    """What reads an output of a node, through views."""
    return [reader for item in node.users if item.args[1] == which for reader in _through(item)]


def _through(node: Node) -> list[Node]:
    return [reader for user in node.users for reader in (_through(user) if user.target in SAME else [user])]


def _is_output(node: Any, of: Node, which: int) -> bool:
    """Whether it is this output of a node, or a view of it."""
    while isinstance(node, Node) and node.target in SAME:
        node = node.args[0]
    return isinstance(node, Node) and node.target is getitem and node.args == (of, which)
