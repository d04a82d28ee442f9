"""Take the dot product of a norm's input with its gradient inside the norm's backward kernel.

A read over depth is followed by a norm, and the read's backward pass begins with δ = dh · h. The norm's backward has
just computed dh from h; without this rewrite, δ is another pass over two tensors for one number per token.

    sum(rms_norm_backward(g, h) ⊙ h)  =  the third output of rms_norm_backward_dotted(g, h)
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, Node

from residua.ops._runtime import fused
from residua.train.compile.rewrites.graphs import VIEWS, call, erase, like, replace_outputs, source, value

aten, prims = torch.ops.aten, torch.ops.prims
RESIDUAL = 4
"""Index of the residual path's gradient among the backward operator's arguments; with it the sum is not the norm's."""


def take_dots(graph: Graph) -> None:
    """Let each norm of a backward graph return the dot products of its gradient and its input, where used."""
    if not fused.INSTALLED:
        return
    import residua.ops.rms_norm.launch  # noqa: F401  (registers the operators)

    for total in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        norm = _norm(total)
        if norm is not None:
            _take(graph, norm, total)


def _norm(total: Node) -> Node | None:
    """The norm's backward node, if `total` sums the product of its gradient and its input over the last axis."""
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
    """Whether the sum is one number per token, of float32 products, as the dot products are."""
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
        dotted = call(graph, torch.ops.residua.rms_norm_backward_dotted.default, *norm.args)
        replace_outputs(graph, norm, dotted)
        dots = like(graph, call(graph, getitem, dotted, 2), total)
    total.replace_all_uses_with(dots)
    erase(graph, *norm.users, norm)
