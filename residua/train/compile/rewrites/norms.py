"""Moves operations next to a norm into its kernels: additions, and the dot product of its input and its gradient.

To `torch.compile` the fused norm is an opaque operator, so its neighbours become separate kernels: the sum that it
reads in the forward pass (x' = x + y), and in the backward pass the sum of its gradient and that of the residual path
(g_x + g). The norm's kernels read or write these tensors anyway.

A read over depth is followed by a norm, and the read's backward pass starts with δ = dh · h. The norm's backward has
just computed dh from h; without this rewrite, δ takes another pass over two tensors for one number per token.

    sum(rms_norm_backward(g, h)[0] ⊙ h)  =  the last output of rms_norm_backward(g, h, dotted=True)

Additions in GatedNorm's kernels took its step at S from 1.049 to 1.019 times pre-norm's (docs/lab/kernels.md, "Gains of
single parts", `residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 4 --compare prenorm,gatednorm,block4`).
RMSNorm's are not measured alone. As a pass of its own, δ took 2.8 ms with Block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from residua.ops._runtime.triton_support import INSTALLED
from residua.train.compile.rewrites.graphs import VIEWS, call, erase, like, replace_outputs, source, value

aten = torch.ops.aten


class Norm(NamedTuple):
    """The operators of a norm: `forward(x, …)` returns normed rows first, `backward` the gradient of x first."""

    forward: OpOverload
    update: int
    """Index of the `forward` argument that is added to x; if given, the last output is the sum."""
    backward: OpOverload
    residual: int
    """Index of the `backward` argument for the residual path's gradient."""


def _norms() -> Iterator[Norm]:
    import residua.ops.gated_norm.launch
    import residua.ops.rms_norm.launch  # noqa: F401  (both register operators)

    ours = torch.ops.residua
    yield Norm(ours.gated_norm.default, 5, ours.gated_norm_backward.default, 8)
    yield Norm(ours.rms_norm.default, 3, ours.rms_norm_backward.default, RESIDUAL)


def fuse_additions(graph: Graph) -> None:
    """Fuse additions into adjacent norms, in a forward or backward graph of aten operators.

    Fuses sums of two tensors of equal shape and dtype, unless one is an elementwise result that inductor would compute
    within the addition.
    """
    if not INSTALLED:
        return
    for norm in _norms():
        for node in graph.find_nodes(op="call_function", target=norm.forward):
            _fuse_forward(graph, node, norm)
        for node in graph.find_nodes(op="call_function", target=norm.backward):
            _fuse_backward(graph, node, norm)


def _fuse_forward(graph: Graph, old: Node, norm: Norm) -> None:
    """Replace norm(a + b) with one operator at the sum's place; other readers of the sum read its output."""
    rows, *rest = old.args
    total = source(rows)
    if _given(old, norm.update) or not _is_plain_sum(total):
        return
    place = _last(total, rest)
    if any(reader <= place for reader in total.users):
        return
    with graph.inserting_before(place.next):
        x, update = (like(graph, a, rows) for a in total.args)
        new = call(graph, norm.forward, *_with((x, *rest), norm.update, update))
        replace_outputs(graph, old, new)
        added = like(graph, call(graph, getitem, new, len(new.meta["val"]) - 1), total)
    total.replace_all_uses_with(added)
    erase(graph, *old.users, old, total)


def _fuse_backward(graph: Graph, old: Node, norm: Norm) -> None:
    """Replace g_x + g with an operator that also takes g, placed after the computation of g."""
    g_x = next((item for item in old.users if item.args[1] == 0), None)
    total = None if g_x is None else _only_reader(g_x)
    if total is None or _given(old, norm.residual) or not _is_plain_sum(total):
        return
    g = [origin for origin in map(source, total.args) if origin is not g_x]
    place = _last(old, g)
    if len(g) != 1 or any(r <= place for item in old.users if item is not g_x for r in item.users):
        return
    with graph.inserting_before(place.next):
        new = call(graph, norm.backward, *_with(old.args, norm.residual, like(graph, g[0], g_x)))
        outputs = replace_outputs(graph, old, new)
        summed = like(graph, outputs[0], total)
    total.replace_all_uses_with(summed)
    erase(graph, total, *old.users, old)


def _given(node: Node, index: int) -> bool:
    """Whether a call passes the argument at this index."""
    return len(node.args) > index and node.args[index] is not None


def _with(args: Sequence[Any], index: int, value: Node) -> list[Any]:
    """The arguments with `value` at this index."""
    padded = [*args, *[None] * (index + 1 - len(args))]
    padded[index] = value
    return padded


def _is_plain_sum(node: Node) -> bool:
    """Whether this is a sum of two tensors of its own shape and dtype that are both in memory anyway."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    total, *operands = (value(n) for n in (node, *node.args))
    if total is None or not all(isinstance(size, int) for size in total.shape):
        return False
    alike = all(v is not None and v.shape == total.shape and v.dtype == total.dtype for v in operands)
    return alike and total.is_contiguous() and not any(_would_be_fused(a) for a in node.args)


def _would_be_fused(operand: Any) -> bool:
    """Whether the operand is an elementwise result with one reader, which inductor computes within the addition."""
    while len(operand.users) == 1 and operand.target in VIEWS:
        operand = operand.args[0]
    return len(operand.users) == 1 and torch.Tag.pointwise in getattr(operand.target, "tags", ())


def _only_reader(node: Node) -> Node | None:
    """The only node that reads this one, looking through views; None if there are several."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.target not in VIEWS:
            return node
    return None


def _last(node: Node, others: Iterable[Any]) -> Node:
    """Whichever of the nodes comes last in the graph."""
    return max([node, *(n for n in others if isinstance(n, Node))])


aten, prims = torch.ops.aten, torch.ops.prims
RESIDUAL = 4
"""Index of the backward argument for the residual path's gradient; with it, the result is not the norm's alone."""


def take_dots(graph: Graph) -> None:
    """Let each norm in a backward graph return the dot products of its gradient and its input, where they are used."""
    if not INSTALLED:
        return
    import residua.ops.rms_norm.launch  # noqa: F401  (registers the operators)

    for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        norm = _norm(total)
        if norm is not None:
            _take(graph, norm, total)


def _norm(total: Node) -> Node | None:
    """The norm's backward node, if `total` sums gradient ⊙ input of that norm over the last axis."""
    product, axes = total.args[:2]
    last = isinstance(product, Node) and axes in ([-1], [product.meta["val"].dim() - 1])
    # autocast requests float32 sums on a GPU, not on a CPU
    plain = len(total.args) == 2 and total.kwargs in ({}, {"dtype": torch.float32})
    if not last or not plain or product.target is not aten.mul.Tensor:  # type: ignore[union-attr]
        return None
    factors = [_plain(factor) for factor in product.args]  # type: ignore[union-attr]
    for g_x, x in (factors, factors[::-1]):
        if g_x is not None and g_x.target is getitem and g_x.args[1] == 0:
            norm: Any = g_x.args[0]
            ours = norm.target is torch.ops.residua.rms_norm_backward.default and len(norm.args) <= RESIDUAL
            if ours and source(norm.args[1]) is x and _fits(total, norm):
                return norm  # type: ignore[no-any-return]
    return None


def _fits(total: Node, norm: Node) -> bool:
    """Whether the sum gives one number per token from float32 products, like the norm's dot products."""
    sums, products, rstd = value(total), value(total.args[0]), value(norm.args[3])
    if sums is None or products is None or rstd is None:
        return False
    return sums.dtype is products.dtype is torch.float32 and sums.numel() == rstd.numel()


def _plain(factor: Any) -> Node | None:
    """A factor without its views and its conversion to float32."""
    while isinstance(factor, Node):
        widened = factor.target is prims.convert_element_type.default and factor.args[1] is torch.float32
        if not widened and factor.target not in VIEWS:
            return factor
        factor = factor.args[0]
    return None


def _take(graph: Graph, norm: Node, total: Node) -> None:
    with graph.inserting_before(norm):
        dotted = call(graph, torch.ops.residua.rms_norm_backward.default, *norm.args, None, None, True)
        replace_outputs(graph, norm, dotted)
        dots = like(graph, call(graph, getitem, dotted, 2), total)
    total.replace_all_uses_with(dots)
    erase(graph, *norm.users, norm)
