"""Lets a junction with streams apply the next sublayer's norm.

Only that norm reads the junction's h and, in the backward pass, only that junction reads the norm's gradient:

    rms_norm(multi_gate_forward(…)[0], gain)              =  multi_gate_forward(…, gain)[0]
    multi_gate_backward(rms_norm_backward(g, …)[0], …)    =  multi_gate_backward(g, …, gain, …)

and the same for the junctions of hyper-connections that have a projection, `hyper_step`. Without h and its gradient, a
junction and its norm move 5 rows less, and h is not saved. PyTorch decides what to save when it divides the joint graph
of both passes, so this rewrite changes the joint graph before that.

A step of S with MGR takes 1.129 times a plain one instead of 1.149, with mHC 1.305 instead of 1.368
(docs/lab/kernels.md, `residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare prenorm,mgr,mhc`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from residua.ops._runtime.triton_support import INSTALLED
from residua.train.compile.rewrites.graphs import VIEWS, call, like

aten, prims = torch.ops.aten, torch.ops.prims
SAME = (*VIEWS, aten.detach.default, aten.alias.default)
"""Operators that return their input values unchanged."""


class Found(NamedTuple):
    """A junction and the norm after it, in the forward and the backward pass."""

    junction: Node
    norm: Node
    norm_backward: Node
    backward: Node


class Kind(NamedTuple):
    """The names of the operators of a kind of junction.

    Given a gain and its eps, the forward operator returns the scalars of h last. Given a gain and these scalars, the
    backward operator takes the gradient of x, and its last output ends with the gain's gradient.
    """

    forward: str
    backward: str
    hidden: int
    """The index of the output that is h, or x."""
    belongs: Callable[[Found], bool]
    """Whether the backward call belongs to the junction, and the operators can apply this junction's norm."""


def _belongs_multi_gate(match: Found) -> bool:
    stats = _arguments(match.backward)["stats"]
    return _is_output(stats[-1], match.junction, 2)


def _belongs_hyper_step(match: Found) -> bool:
    arguments = _arguments(match.backward)
    return _is_output(arguments["weights"], match.junction, 4) and arguments["norm"] != "none"


KINDS = (
    Kind("multi_gate_forward", "multi_gate_backward", 0, _belongs_multi_gate),
    Kind("hyper_step", "hyper_step_backward", 1, _belongs_hyper_step),
)


def norm_in_junctions(graph: Graph) -> None:
    """In a joint graph of both passes, replace every junction whose h is read only by a plain norm."""
    if not INSTALLED:
        return
    import residua.ops.hyper_connection.launch
    import residua.ops.multi_gate.launch
    import residua.ops.rms_norm.launch  # noqa: F401  (they register operators)

    for kind in KINDS:
        for junction in graph.find_nodes(op="call_function", target=_operator(kind.forward)):
            match = _find(kind, junction)
            if match is not None:
                hidden_stats = _replace_forward(graph, kind, match)
                _replace_backward(graph, match, hidden_stats)


def _operator(name: str) -> Any:
    return getattr(torch.ops.residua, name).default


def _arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by name, except those left at their defaults."""
    operator: Any = node.target
    return {argument.name: value for argument, value in zip(operator._schema.arguments, node.args, strict=False)}


def _call_normed(graph: Graph, old: Node, **arguments: Any) -> dict[Any, Node]:
    """The outputs of a new call like `old` with additional arguments."""
    operator: Any = old.target
    arguments = _arguments(old) | arguments
    new = call(graph, operator, *(arguments[argument.name] for argument in operator._schema.arguments))
    return {which: call(graph, getitem, new, which) for which in range(len(new.meta["val"]))}


def _find(kind: Kind, junction: Node) -> Found | None:
    forward, backward = _operator("rms_norm"), _operator("rms_norm_backward")
    readers = _readers(junction, kind.hidden)
    by_target = {reader.target: reader for reader in readers}
    if len(readers) != 2 or by_target.keys() != {forward, backward}:
        return None
    norm, norm_backward = by_target[forward], by_target[backward]
    ends = _readers(norm_backward, 0)
    if len(ends) != 1 or ends[0].target is not _operator(kind.backward):
        return None
    match = Found(junction, norm, norm_backward, ends[0])
    return match if _fits(kind, match) else None


def _fits(kind: Kind, match: Found) -> bool:
    """Whether the four nodes belong together, none is checkpointed, and their results are read late enough."""
    junction, norm, norm_backward, backward = match
    plain = len(norm.args) == 3 and len(norm_backward.args) == 4
    if not plain or any("recompute" in node.meta for node in match):
        return False
    _, x, gain, rstd = norm_backward.args
    together = (
        _is_output(norm.args[0], junction, kind.hidden)
        and _is_output(x, junction, kind.hidden)
        and gain is norm.args[1]
        and _is_output(rstd, norm, 1)
        and _readers(norm, 1) == [norm_backward]
        and _is_output(backward.args[0], norm_backward, 0)
        and kind.belongs(match)
    )
    written = [item for item in junction.users if item.args[1] != kind.hidden]
    g_gain = [item for item in norm_backward.users if item.args[1] == 1]
    return together and _follow(_place_forward(match), written) and _follow(_place_backward(match), g_gain)


def _place_forward(match: Found) -> Node:
    """The last node that the new forward call depends on."""
    gain = match.norm.args[1]
    return max(n for n in (match.junction, gain) if isinstance(n, Node))


def _place_backward(match: Found) -> Node:
    """The last node that the new backward call depends on, or the norm's backward, whichever is later."""
    return max(match.norm_backward, *(n for n in match.backward.all_input_nodes if n is not match.backward.args[0]))


def _follow(place: Node, items: Iterable[Node]) -> bool:
    """Whether everything that reads these nodes comes after `place`."""
    return all(reader > place for item in items for reader in item.users)


def _replace_forward(graph: Graph, kind: Kind, match: Found) -> Node:
    """Replace the forward calls; returns the scalars of h, which the new backward call needs."""
    junction, norm, *_ = match
    _, gain, norm_eps = norm.args
    with _inserting(graph, _place_forward(match), junction):
        outputs = _call_normed(graph, junction, gain=gain, norm_eps=norm_eps)
        for item in list(norm.users):
            if item.args[1] == 0:
                item.replace_all_uses_with(like(graph, outputs[kind.hidden], item))
        for item in list(junction.users):
            if item.args[1] != kind.hidden:
                item.replace_all_uses_with(outputs[item.args[1]])
    return outputs[len(outputs) - 1]


def _replace_backward(graph: Graph, match: Found, hidden_stats: Node) -> None:
    *_, norm_backward, backward = match
    g, _, gain, _ = norm_backward.args
    with _inserting(graph, _place_backward(match), backward):
        g_normed = like(graph, g, backward.args[0])
        outputs = _call_normed(graph, backward, g_hidden=g_normed, gain=gain, hidden_stats=hidden_stats)
        last = len(outputs) - 1
        whole, length = outputs[last], len(backward.meta["val"][last])
        outputs[last] = call(graph, aten.slice.Tensor, whole, 0, 0, length)
        g_gain = call(graph, aten.slice.Tensor, whole, 0, length, len(whole.meta["val"]))
        for item in list(backward.users):
            item.replace_all_uses_with(outputs[item.args[1]])
        for item in list(norm_backward.users):
            if item.args[1] == 1:
                if item.meta["val"].dtype != g_gain.meta["val"].dtype:
                    g_gain = call(graph, prims.convert_element_type.default, g_gain, item.meta["val"].dtype)
                item.replace_all_uses_with(g_gain)


@contextmanager
def _inserting(graph: Graph, place: Node, old: Node) -> Iterator[None]:
    """Insert nodes after `place`, in the same pass as `old`."""
    before = set(graph.nodes)
    with graph.inserting_before(place.next):
        yield
    tag = {k: v for k, v in old.meta.items() if k == "partitioner_tag"}
    for node in graph.nodes:
        if node not in before:
            node.meta.update(tag)


def _readers(node: Node, which: int) -> list[Node]:
    """The nodes that read an output of a node, looking through views."""
    return [reader for item in node.users if item.args[1] == which for reader in _through(item)]


def _through(node: Node) -> list[Node]:
    return [reader for user in node.users for reader in (_through(user) if user.target in SAME else [user])]


def _is_output(node: Any, of: Node, which: int) -> bool:
    """Whether `node` is the given output of another node, or a view of it."""
    while isinstance(node, Node) and node.target in SAME:
        node = node.args[0]
    return isinstance(node, Node) and node.target is getitem and node.args == (of, which)
