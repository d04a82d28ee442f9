"""Routing of tokens to experts in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from residua.ops._runtime.numeric import no_autocast, wide
from residua.ops.expert_slots import sort_slots


class Routed(NamedTuple):
    """The routing of N tokens to k experts each, with N·k slots in total.

    weights, chosen: [N, k], the experts of each token and their weights; order: [N·k], the token-major slot
    (token · k + choice) of each row when slots are sorted by expert; ends: [E], where each expert's rows end. Sums over
    tokens: load [E], the share of all choices that fell on each expert; probability [E], the mean probability of each;
    z, the mean squared log-sum-exp of the logits. Weights, probability and z have gradients.
    """

    weights: Tensor
    chosen: Tensor
    order: Tensor
    ends: Tensor
    load: Tensor
    probability: Tensor
    z: Tensor


def route(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    score: str = "softmax",
    bias: Tensor | None = None,
    scale: float = 1.0,
    groups: tuple[int, int, int] | None = None,
    offset: Tensor | None = None,
) -> Routed:
    """Choose the `top_k` experts of each token, in at least float32: x [N, C], weight [E, C], bias and offset [E].

        l = W x + offset,   s = softmax(l) or σ(l),   T = the k largest of s + bias,   w_e = scale · s_e / Σ_{j∈T} s_j

    Without `normalize`, w_e = scale · s_e. The probabilities are s; for σ(l), s divided by its sum. With (G, g, n) as
    `groups`, experts form G groups of successive experts. T is chosen in the g groups whose n largest s + bias have the
    largest sum.
    """
    with no_autocast(x):  # in half precision, near ties would change the routing
        logits = linear(wide(x), wide(weight), None if offset is None else wide(offset))
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + wide(bias)
    chosen = (ranked if groups is None else _in_best_groups(ranked, *groups)).topk(top_k).indices
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    order, _, ends, _ = sort_slots(chosen, len(weight))
    load = ends.diff(prepend=ends.new_zeros(1)).to(logits.dtype) / max(1, chosen.numel())
    shares = scores if score == "softmax" else scores / scores.sum(-1, keepdim=True)
    z = logits.logsumexp(-1).square().mean()
    return Routed(weights * scale, chosen, order.to(torch.int32), ends, load, shares.mean(0), z)


def _in_best_groups(ranked: Tensor, groups: int, top_groups: int, best: int) -> Tensor:
    """ranked [N, E] if the expert's group is among the best, −∞ elsewhere."""
    by_group = ranked.unflatten(-1, (groups, -1))
    chosen = by_group.topk(best).values.sum(-1).topk(top_groups).indices
    out = torch.ones(by_group.shape[:-1], dtype=torch.bool, device=ranked.device).scatter(-1, chosen, False)
    return by_group.masked_fill(out[..., None], float("-inf")).flatten(-2)
