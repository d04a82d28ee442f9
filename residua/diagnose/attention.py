"""Sums over the queries of softmax attention, block by block: a whole T×T map of all heads never exists.

Both adapters pass queries and keys as attention uses them, normed and rotated. Each block of queries sees all keys; its
softmax is added to the sums and dropped, so memory is heads × block × T for any number of layers and sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residua.ops._runtime.numeric import wide

BLOCK_ELEMENTS = 1 << 24
"""Scores held at once: 64 MiB in float32."""
CORNER = 48
"""Queries and keys whose weights are kept one by one."""


@dataclass(frozen=True)
class Scores:
    """How attention scores are made of q and k.

    scale: the factor on q·k; window: a query sees itself and the `window − 1` keys before it (None: all earlier ones);
    mask: [B or 1, H or 1, T, K], True where a query may look, or added to the scores if it is a float; without a mask,
    causal: no query sees later keys; softcap: s ← c·tanh(s/c); bias: [B or 1, H or 1, T, K], added to the scores; sink:
    [H], one logit per head in the softmax's denominator.
    """

    scale: float
    window: int | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = True


@dataclass(frozen=True)
class AttentionSums:
    """Sums over the queries of one layer, A the attention weights of one sequence and head, K keys (one per token).

    received [B, H, K]: Σ_i A_ik, what key k receives; uniform [B, K]: the same if every query attended equally to all
    it can see; seen_by [B, K]: how many queries can see key k; entropy [B, H]: Σ_i −Σ_k A_ik ln A_ik in nats;
    uniform_entropy [B]: Σ_i ln(keys i can see); outside [B, H]: Σ_i of the mass on the learned sink; corner [H, i, k]:
    A itself of the first sequence's first CORNER queries and keys.
    """

    received: Tensor
    uniform: Tensor
    seen_by: Tensor
    entropy: Tensor
    uniform_entropy: Tensor
    outside: Tensor
    corner: Tensor


def attention_sums(q: Tensor, k: Tensor, how: Scores) -> AttentionSums:
    """The sums of one layer; q [B, H, T, D], k [B, H_kv, K, D]."""
    return _pass_over(q, k, None, how)[0]


def attend_and_sum(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, AttentionSums]:
    """Attention's own output [B, H, T, D_v] and its sums, in one pass over the blocks."""
    sums, blocks = _pass_over(q, k, v, how)
    return torch.cat(blocks, 2), sums


def _pass_over(q: Tensor, k: Tensor, v: Tensor | None, how: Scores) -> tuple[AttentionSums, list[Tensor]]:
    batch, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    count = k.shape[2]
    received, entropy, outside = (_zeros(q, heads, *s) for s in ((count,), (), ()))
    uniform, seen_by, uniform_entropy = (_zeros(q, *s) for s in ((count,), (count,), ()))
    keys = k.repeat_interleave(groups, 1).to(exact).transpose(-1, -2)
    values = None if v is None else v.repeat_interleave(groups, 1)
    corner = q.new_zeros(heads, min(length, CORNER), min(count, CORNER), dtype=torch.float64)
    blocks = []
    for rows in _blocks(batch * heads, length):
        scores, visible = _scores(q[:, :, rows].to(exact) @ keys, rows, how)
        weights, log_weights, lost = _softmax(scores, how.sink)
        if values is not None:
            blocks.append(weights.to(values.dtype) @ values)
        with torch.no_grad():
            received += weights.sum(2)
            corner[:, rows] = weights[0, :, : max(0, CORNER - rows.start), :CORNER].double()
            entropy -= torch.where(weights > 0, weights * log_weights, 0).sum((2, 3))
            outside += lost
            choices = visible.sum(-1, dtype=torch.float64).clamp(min=1)
            uniform += (visible / choices[..., None]).sum(1)
            seen_by += visible.sum(1)
            uniform_entropy += choices.log().sum(1)
    return AttentionSums(received, uniform, seen_by, entropy, uniform_entropy, outside, corner), blocks


def _zeros(q: Tensor, *shape: int) -> Tensor:
    return torch.zeros(q.shape[0], *shape, dtype=torch.float64, device=q.device)


def _blocks(rows: int, length: int) -> Iterator[slice]:
    block = max(1, min(length, BLOCK_ELEMENTS // max(1, rows * length)))
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


def _scores(products: Tensor, rows: slice, how: Scores) -> tuple[Tensor, Tensor]:
    """Masked scores [B, H, rows, K], and which keys each query can see [B or 1, rows, K]."""
    scores = products * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    if how.bias is not None:
        scores = scores + how.bias[:, :, rows].to(scores.dtype)
    length = scores.shape[-1]
    if how.mask is None and not how.causal:
        return scores, torch.ones(1, 1, 1, dtype=torch.bool, device=scores.device).expand(1, *scores.shape[-2:])
    i = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
    j = torch.arange(length, device=scores.device)[None]
    if how.mask is None:
        visible = j <= i if how.window is None else (j <= i) & (j > i - how.window)
        return scores.masked_fill(~visible, float("-inf")), visible[None]
    part = how.mask[:, :, rows, :length]
    if part.dtype == torch.bool:
        return scores.masked_fill(~part, float("-inf")), part.any(1)
    lowest = torch.finfo(part.dtype).min / 2
    allowed = part > lowest
    return (scores + part).masked_fill(~allowed, float("-inf")), allowed.any(1)


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their logarithms, and the mass [B, H] that went to the learned sink."""
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, wide(sink).to(scores.dtype)[:, None, None].expand_as(total))
    log_weights = (scores - total).masked_fill(torch.isneginf(total), float("-inf"))
    weights = log_weights.exp()
    lost = scores.new_zeros(scores.shape[:2]) if sink is None else (1 - weights.sum(-1)).sum(-1)
    return weights, log_weights, lost


def merged(parts: Sequence[AttentionSums]) -> AttentionSums:
    """The heads of several attentions that one layer runs, as if they were one; the floors are those of the first."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        received=torch.cat([part.received for part in parts], 1),
        entropy=torch.cat([part.entropy for part in parts], 1),
        outside=torch.cat([part.outside for part in parts], 1),
        corner=torch.cat([part.corner for part in parts]),
    )
