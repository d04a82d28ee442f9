"""Sums over the attention weights of softmax layers, block by block; the full T×T map of all heads is never stored.

Both adapters pass queries and keys as attention uses them, after norm and rotation. Each block of queries sees all
keys. Its softmax is added to the sums and freed, so memory is heads × block × T for any number of layers and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.ops._runtime.numeric import soft_cap, wide

BLOCK_ELEMENTS = 1 << 24
"""Scores in memory at once: 64 MiB in float32."""
CORNER = 48
"""The number of first queries and keys whose individual weights are stored."""


@dataclass(frozen=True)
class Scores:
    """How attention scores are computed from q and k.

    scale: the factor on q·k; window: a query sees itself and the `window − 1` keys before it (None: all earlier ones);
    mask: [B or 1, H or 1, T, K], True where a query may look, or added to the scores if it is a float; without a mask,
    causal: no query sees later keys; softcap: s ← c·tanh(s/c); bias: [B or 1, H or 1, T, K], added to the scores; sink:
    [H], one extra logit per head in the softmax's denominator.
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
    """Sums over the queries of one layer. A: the attention weights of one sequence and head; K: the number of keys
    (tokens).

    received [B, H, K]: Σ_i A_ik, the mass that key k receives; uniform [B, K]: the same if every query attended equally
    to all keys it can see; seen_by [B, K]: how many queries can see key k; entropy [B, H]: Σ_i −Σ_k A_ik ln A_ik in
    nats; uniform_entropy [B]: Σ_i ln(keys i can see); outside [B, H]: Σ_i of the mass on the learned sink; corner [H,
    i, k]: A for the first CORNER queries and keys of the first sequence.
    """

    received: Tensor
    uniform: Tensor
    seen_by: Tensor
    entropy: Tensor
    uniform_entropy: Tensor
    outside: Tensor
    corner: Tensor


def attention_sums(q: Tensor, k: Tensor, how: Scores) -> AttentionSums:
    """Return the sums of one layer; q [B, H, T, D], k [B, H_kv, K, D]."""
    return _pass_over(q, k, None, how)[0]


def attend_and_sum(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, AttentionSums]:
    """Return the attention output [B, H, T, D_v] and the sums, in one pass over the blocks."""
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
    scores = soft_cap(products * how.scale, how.softcap)
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
    """Return the weights, their logarithms, and the mass [B, H] on the learned sink."""
    total = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        total = torch.logaddexp(total, wide(sink).to(scores.dtype)[:, None, None].expand_as(total))
    log_weights = (scores - total).masked_fill(torch.isneginf(total), float("-inf"))
    weights = log_weights.exp()
    lost = scores.new_zeros(scores.shape[:2]) if sink is None else (1 - weights.sum(-1)).sum(-1)
    return weights, log_weights, lost


def merged(parts: Sequence[AttentionSums]) -> AttentionSums:
    """Merge the heads of several attention modules in one layer; uniform floors are taken from the first module."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        received=torch.cat([part.received for part in parts], 1),
        entropy=torch.cat([part.entropy for part in parts], 1),
        outside=torch.cat([part.outside for part in parts], 1),
        corner=torch.cat([part.corner for part in parts]),
    )


SINK = 0.3
"""A head has a sink at key k when its mean attention to k exceeds this (Gu et al., arXiv 2410.10781)."""
FLOORS = 3.0
"""It must also exceed the uniform floor this many times, because the floor is high in short sequences."""
AGREED = 0.9
SHOWN = 3


class HeadFacts(Frozen):
    """One head: mean attention to the first token, mean entropy in nats."""

    first_token: float
    entropy: float


class PositionFacts(Frozen):
    """One key position: mean attention over heads, sequences and the queries that see it; share of heads above 0.3."""

    position: int
    attention: float
    uniform: float
    sink_rate: float


class AttentionFacts(Frozen):
    """One softmax layer: each number, with its value under uniform attention."""

    layer: int
    first_token: float
    uniform_first_token: float
    sink_rate: float
    entropy: float
    uniform_entropy: float
    learned_sink: float
    heads: list[HeadFacts]
    positions: list[PositionFacts]


class TokenSink(Frozen):
    """A token id that attracts attention at any position except the first: its share of the layer's attention."""

    layer: int
    token: int
    text: str
    attention: float
    uniform: float


def learned_sinks(attention: Sequence[AttentionFacts]) -> list[int]:
    """Return the layers whose learned sink takes more than `SINK` of the attention."""
    return [layer.layer for layer in attention if layer.learned_sink > SINK]


class LayerSums:
    """The sums of one layer. With A the weights of one sequence and head, and T queries:

    first token: mean over heads and queries of A_i0; its floor under uniform attention is H_T/T for plain causal
    attention. α_k: mean of A_ik over the queries that see k. Sink rate: share of heads and sequences with α_0 > 0.3.
    Entropy: mean of −Σ_k A_ik ln A_ik, in nats; its ceiling is the mean of ln(keys seen).
    """

    def __init__(self, sums: AttentionSums, vocabulary: int) -> None:
        heads, length = sums.received.shape[1:]
        self.sequences = 0
        self.first, self.entropy, self.outside = (_zeros_like_sums(sums, heads) for _ in range(3))
        self.alpha, self.above = (_zeros_like_sums(sums, heads, length) for _ in range(2))
        self.floor = _zeros_like_sums(sums, length)
        self.by_token, self.uniform_by_token = (_zeros_like_sums(sums, vocabulary) for _ in range(2))
        self.uniform_first, self.uniform_entropy = (_zeros_like_sums(sums) for _ in range(2))
        self.length = length

    def add(self, sums: AttentionSums, tokens: Tensor) -> None:
        alpha = sums.received / sums.seen_by[:, None].clamp(min=1)
        self.first += sums.received[..., 0].sum(0)
        self.entropy += sums.entropy.sum(0)
        self.outside += sums.outside.sum(0)
        self.alpha += alpha.sum(0)
        self.above += (alpha > SINK).double().sum(0)
        batch = tokens.shape[0]
        self.floor += (sums.uniform / sums.seen_by.clamp(min=1)).expand(batch, -1).sum(0)
        self.uniform_first += sums.uniform[:, 0].expand(batch).sum()
        self.uniform_entropy += sums.uniform_entropy.expand(batch).sum()
        ids = tokens[:, 1:].flatten()
        self.by_token.index_add_(0, ids, sums.received.mean(1)[:, 1:].flatten())
        self.uniform_by_token.index_add_(0, ids, sums.uniform.expand(batch, -1)[:, 1:].flatten())
        self.sequences += batch

    def facts(self, layer: int) -> AttentionFacts:
        queries = self.sequences * self.length
        first, entropy = (self.first / queries).tolist(), (self.entropy / queries).tolist()
        return AttentionFacts(
            layer=layer,
            first_token=float(self.first.mean() / queries),
            uniform_first_token=float(self.uniform_first) / queries,
            sink_rate=float(self.above[:, 0].mean() / self.sequences),
            entropy=float(self.entropy.mean() / queries),
            uniform_entropy=float(self.uniform_entropy) / queries,
            learned_sink=float(self.outside.mean() / queries),
            heads=[HeadFacts(first_token=f, entropy=e) for f, e in zip(first, entropy, strict=True)],
            positions=self._positions(),
        )

    def _positions(self) -> list[PositionFacts]:
        """Return the keys with the largest α, among those that at least half of the queries see."""
        alpha = self.alpha.mean(0)[: max(1, self.length // 2)] / self.sequences
        order = alpha.topk(min(SHOWN, len(alpha))).indices.tolist()
        return [
            PositionFacts(
                position=k,
                attention=float(alpha[k]),
                uniform=float(self.floor[k] / self.sequences),
                sink_rate=float(self.above[:, k].mean() / self.sequences),
            )
            for k in order
        ]

    def sink_heads(self) -> dict[int, list[int]]:
        """Return the positions at which heads have a sink on average over all sequences, with those heads.

        A position after the first counts only if there are at least four sequences and nearly all agree. With fewer, a
        position cannot be distinguished from the token that happens to be there.
        """
        alpha = self.alpha[:, : max(1, self.length // 2)] / self.sequences
        floor = self.floor[: alpha.shape[1]] / self.sequences
        sink = (alpha > SINK) & (alpha > FLOORS * floor)
        agreed = self.above[:, : alpha.shape[1]] >= AGREED * self.sequences
        sink[:, 1:] &= agreed[:, 1:] & (self.sequences >= 4)
        return {k: sink[:, k].nonzero().flatten().tolist() for k in sink.any(0).nonzero().flatten().tolist()}

    def token_sinks(self, layer: int, text_of: Callable[[int], str]) -> list[TokenSink]:
        """Return the token ids that take more than 0.3 of the layer's attention at positions after the first."""
        queries = self.sequences * self.length
        share, floor = self.by_token / queries, self.uniform_by_token / queries
        ids = ((share > SINK) & (share > FLOORS * floor)).nonzero().flatten().tolist()
        return [
            TokenSink(layer=layer, token=i, text=text_of(i), attention=float(share[i]), uniform=float(floor[i]))
            for i in ids
        ]


def _zeros_like_sums(sums: AttentionSums, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=sums.received.device)
