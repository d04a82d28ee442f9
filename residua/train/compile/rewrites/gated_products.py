"""Computes attention's gated output again in the backward pass, instead of keeping it.

The output projection reads p = o ⊙ σ(g), and its weight gradient dW = dYᵀ p reads it again. The gate itself
needs o and g, so without this rewrite each layer keeps 3C numbers per token, o, g and p, and with it 2C. Computing p
again reads o and g and writes p, 3C, or 4C where an anchor is mixed into g.

A step of 12 layers of 768 on 32,768 tokens with two streams and ExoFormer takes 12.84 instead of 13.40 GiB and 0.9 %
longer (one H200), so it only runs with RESIDUA_RECOMPUTE_GATES=1 (docs/results/step.md). To time it, with and without:
`residua bench step mgr-s-prenorm --micro-batch 32 --accumulate 1 --compare "prenorm,mgr2+exoformer
model.ffn.hidden=2560"`. Products in FP8 keep p themselves and are left alone.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from residua.train.compile.rewrites.graphs import VIEWS, source

aten = torch.ops.aten
CONVERSION = torch.ops.prims.convert_element_type.default
REGION = 1
"""A number that nodes of one recomputed region share; PyTorch saves what passes from one region to the next."""


def recompute_gated(graph: Graph) -> None:
    """Mark every gated output that a product reads, so that the backward pass computes it again."""
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        factor = product.args[0]
        if isinstance(factor, Node) and (gated := _gated(source(factor))) is not None:
            for node in (*gated, *_views(factor)):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = REGION


def _gated(node: Node) -> list[Node] | None:
    """The nodes that compute a gated output from attention's output and the gate's projection."""
    rounded = []
    while node.target is CONVERSION:
        rounded.append(node)
        node = source(node.args[0])
    if str(node.target) == "residua.gate_heads.default":
        return [*rounded, node]
    if node.target is not aten.mul.Tensor:
        return None
    values = [n for n in node.all_input_nodes if source(n).target is aten.sigmoid.default]
    return [*rounded, node, source(values[0])] if len(values) == 1 and len(node.all_input_nodes) == 2 else None


def _views(node: Node) -> list[Node]:
    """The views between a node and what they show."""
    views = []
    while node.target in VIEWS:
        views.append(node)
        (node,) = node.all_input_nodes
    return views
