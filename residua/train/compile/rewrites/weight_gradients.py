"""Splits weight gradients so that their tiles fill the GPU.

dW = dYᵀX sums over all tokens into a small matrix, whose tiles rarely form whole waves over the multiprocessors:
5120×1280 is 200 tiles of 128×256 on 132 of them, so half of the GPU is idle in the second wave. Split over tokens into
s shares, the product is a batch with s times as many tiles. The shares are added where the gradient is converted to
float32 anyway:

    dW = Σ_j dY_jᵀ X_j,   j = 1 … s

The shares are rounded to the products' dtype, as the whole was, and added in float32. Below one wave a matrix library
splits the sum itself, but gains less from it, and adds the shares in a separate pass.

Shares of the feed-forward's gradients made a step of L 15 ms shorter (docs/lab/kernels.md, "Gains of single parts",
`residua bench step mgr-l-prenorm --micro-batch 16 --accumulate 4`).
"""

from __future__ import annotations

from functools import reduce
from math import ceil

import torch
from torch import Tensor
from torch.fx import Graph, Node

from residua.ops._runtime.triton_support import multiprocessors
from residua.train.compile.rewrites.graphs import call, value

aten, prims = torch.ops.aten, torch.ops.prims

TILES = ((128, 256), (256, 128), (192, 192), (320, 128))
"""Tile sizes of a matrix library's fast kernels."""
SPLITS = (1, 2, 4, 8)
FLOPS_PER_BYTE = 190
"""FLOPs that a GPU computes while it moves a byte: the cost of a share's traffic."""
GAIN = 1.08
"""Minimum speedup for splitting a product."""


def split_weight_gradients(graph: Graph) -> None:
    """Split every product dYᵀX of 16-bit matrices on a GPU that becomes faster when split."""
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        operands = _weight_gradient(node)
        if operands is None:
            continue
        g, x = (value(operand) for operand in operands)
        if g is None or x is None or not _suits(g, x):
            continue
        splits = best_split(len(g), g.shape[1], x.shape[1], multiprocessors(g))
        if splits > 1:
            _split(graph, node, *operands, splits)


def best_split(tokens: int, rows: int, columns: int, multiprocessors: int) -> int:
    """The number of shares to split the sum over `tokens` of a rows × columns gradient into; 1 leaves it whole."""
    possible = [s for s in SPLITS if tokens % (64 * s) == 0] or [1]
    cost = {s: _cost(s, tokens, rows, columns, multiprocessors) for s in possible}
    best = min(possible, key=lambda s: cost[s])
    return best if cost[1] > GAIN * cost[best] else 1


def _cost(splits: int, tokens: int, rows: int, columns: int, multiprocessors: int) -> float:
    """Time per gradient element, in FLOPs: whole waves of products, then reading the shares and writing the sum."""
    waves = [(r * c, ceil(ceil(rows / r) * ceil(columns / c) * splits / multiprocessors)) for r, c in TILES]
    filled = max(rows * columns * splits / (area * count * multiprocessors) for area, count in waves)
    return 2 * tokens / filled + FLOPS_PER_BYTE * (2 * splits + 4)


def _weight_gradient(product: Node) -> tuple[Node, Node] | None:
    """dY and X of a product dYᵀX."""
    left, right = product.args
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    turned = left.target is aten.permute.default and list(left.args[1]) == [1, 0]  # type: ignore[arg-type]
    return (left.args[0], right) if turned and isinstance(left.args[0], Node) else None  # type: ignore[return-value]


def _suits(g: Tensor, x: Tensor) -> bool:
    fixed = all(isinstance(size, int) for size in (*g.shape, *x.shape))
    return fixed and g.is_cuda and g.dtype in (torch.bfloat16, torch.float16)


def _split(graph: Graph, product: Node, g: Node, x: Node, splits: int) -> None:
    dtype = product.meta["val"].dtype
    with graph.inserting_before(product):
        shares = [call(graph, aten.reshape.default, t, [splits, -1, t.meta["val"].shape[1]]) for t in (g, x)]
        batch = call(graph, aten.bmm.default, call(graph, aten.permute.default, shares[0], [0, 2, 1]), shares[1])
        # additions, not a sum over an axis: inductor's reduction of eight shares takes four times as long
        parts = [call(graph, aten.select.int, batch, 0, j) for j in range(splits)]
        wide = [call(graph, prims.convert_element_type.default, part, torch.float32) for part in parts]
        whole = reduce(lambda total, part: call(graph, aten.add.Tensor, total, part), wide)
        rounded = call(graph, prims.convert_element_type.default, whole, dtype)
    for reader in list(product.users):
        widened = reader.target is prims.convert_element_type.default and reader.args[1] is torch.float32
        if widened:
            reader.replace_all_uses_with(whole)
    product.replace_all_uses_with(rounded)
