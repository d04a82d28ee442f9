"""Writes the gradient of an attention layer's projection [Q | K | V] in one piece.

The backward pass of QK-norm and rotation returns the gradients of queries and keys as separate tensors; attention
returns that of the values. Concatenating them to the projection's gradient reads and writes each once more:

    cat(norm_rotate_backward(dq, q), norm_rotate_backward(dk, k), dv)  =  packed_heads_backward(dq, dk, dv, q, k)

A step of L became 9 ms shorter (docs/lab/kernels.md, "Gains of single parts", `residua bench step mgr-l-prenorm
--micro-batch 16 --accumulate 4`).
"""

from __future__ import annotations

from math import prod
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from residua.ops._runtime.triton_support import INSTALLED
from residua.train.compile.rewrites.graphs import call, value

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default)
"""Operators that keep a tensor's elements in order."""


def pack_head_gradients(graph: Graph) -> None:
    """Replace concatenations of a layer's head gradients with the operator that writes all three.

    A match joins, along the last axis, the gradients of queries and keys and a third tensor with as many heads as the
    keys. Nothing else may read the first two. Nodes left without readers are not erased here.
    """
    if not INSTALLED:
        return
    import residua.ops.norm_rotate.launch  # noqa: F401  (registers the operators)

    for cat in graph.find_nodes(op="call_function", target=aten.cat.default):
        layer = _layer(cat)
        if layer is not None:
            _pack(graph, cat, layer)


class Layer(NamedTuple):
    """The backward passes of a layer's queries and keys, and the gradient of its values [B, T, H_kv, D] or reshaped."""

    query: Node
    key: Node
    values: Node

    @property
    def arguments(self) -> tuple[Any, ...]:
        dq, q, query, cos, sin, query_eps = self.query.args
        dk, k, key, *_, key_eps = self.key.args
        return dq, dk, self.values, q, k, query, key, cos, sin, query_eps, key_eps


def _layer(cat: Node) -> Layer | None:
    """The layer whose head gradients this concatenation joins, if any."""
    parts: Any = cat.args[0]
    joined, axis = value(cat), cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    if joined is None or axis not in (-1, joined.dim() - 1) or len(parts) != 3:
        return None
    query, key = (_normed(part) for part in parts[:2])
    if query is None or key is None or query is key or query.args[3:5] != key.args[3:5]:
        return None
    layer = Layer(query, key, parts[2])
    return layer if _fits(layer, parts, joined) else None


def _fits(layer: Layer, parts: Any, joined: torch.Tensor) -> bool:
    """Whether the three parts have the shapes and dtype of one projection's gradient, with static sizes."""
    q, k = (value(node.args[1]) for node in (layer.query, layer.key))
    tensors = [value(part) for part in parts]
    if q is None or k is None or any(v is None or v.dtype != q.dtype for v in (*tensors, k)):
        return False
    columns = [q.shape[2] * q.shape[3], k.shape[2] * k.shape[3], k.shape[2] * k.shape[3]]
    fixed = all(isinstance(size, int) for size in (*q.shape, *k.shape, *joined.shape))
    alike = q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3] and joined.shape[:-1].numel() == prod(q.shape[:2])
    return fixed and alike and [v.shape[-1] for v in tensors if v is not None] == columns


def _normed(part: Any) -> Node | None:
    """The `norm_rotate_backward` whose first output this is, if nothing else reads that output."""
    while part.target in RESHAPES and len(part.users) == 1:
        part = part.args[0]
    if part.target is not getitem or len(part.users) > 1:
        return None
    source, which = part.args
    backward = torch.ops.residua.norm_rotate_backward.default
    return source if source.target is backward and which == 0 else None


def _pack(graph: Graph, cat: Node, layer: Layer) -> None:
    """Insert the operator before all its readers; the gains' gradients are its outputs 1 and 2."""
    gains = [(item, which) for which, node in ((1, layer.query), (2, layer.key)) for item in node.users if item.args[1]]
    place = min([cat, *(reader for item, _ in gains for reader in item.users)])
    if any(place <= n for n in layer.arguments if isinstance(n, Node)):
        return
    keys: Any = layer.key.args[1]
    with graph.inserting_before(place):
        values = _heads(graph, layer.values, list(keys.meta["val"].shape))
        operator = torch.ops.residua.packed_heads_backward.default
        packed = call(graph, operator, *layer._replace(values=values).arguments)
        for item, which in gains:
            item.replace_all_uses_with(call(graph, getitem, packed, which))
        whole = call(graph, aten.reshape.default, call(graph, getitem, packed, 0), list(cat.meta["val"].shape))
    cat.replace_all_uses_with(whole)


def _heads(graph: Graph, values: Node, shape: list[int]) -> Node:
    """The gradient of the values as heads [B, T, H_kv, D]; attention's own output, if it was only reshaped since."""
    chain: list[Any] = [values]
    while chain[-1].target in RESHAPES:
        chain.append(chain[-1].args[0])
    matches = [node for node in chain if list(node.meta["val"].shape) == shape]
    return matches[-1] if matches else call(graph, aten.reshape.default, values, shape)
