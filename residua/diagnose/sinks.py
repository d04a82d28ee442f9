"""Running sums over the attention weights of one softmax layer, and the facts that come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.attention import AttentionSums

SINK = 0.3
"""A head has a sink at key k when its mean attention to k exceeds this (Gu et al., arXiv 2410.10781)."""
FLOORS = 3.0
"""… and also this many times the uniform floor, which in short sequences is itself high."""
AGREED = 0.9
SHOWN = 3


class HeadFacts(Frozen):
    """One head: mean attention to the first token, mean entropy in nats."""

    first_token: float
    entropy: float


class PositionFacts(Frozen):
    """One key position: mean over heads, sequences and the queries that see it; share of heads above 0.3."""

    position: int
    attention: float
    uniform: float
    sink_rate: float


class AttentionFacts(Frozen):
    """One softmax layer, each number beside what uniform attention would give."""

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
    """A token id that draws attention wherever it stands (first position not counted): share of a layer's attention."""

    layer: int
    token: int
    text: str
    attention: float
    uniform: float


def learned_sinks(attention: Sequence[AttentionFacts]) -> list[int]:
    """The layers whose learned sink takes more than a sink's share of attention."""
    return [layer.layer for layer in attention if layer.learned_sink > SINK]


class LayerSums:
    """One layer. With A the weights of a sequence and head of T queries:

    first token: mean over heads and queries of A_i0; its floor under uniform attention is H_T/T for plain causal
    attention. α_k: mean of A_ik over the queries that see k. Sink rate: share of heads and sequences with α_0 > 0.3.
    Entropy: mean of −Σ_k A_ik ln A_ik, in nats; its ceiling is the mean of ln(keys seen).
    """

    def __init__(self, sums: AttentionSums, vocabulary: int) -> None:
        heads, length = sums.received.shape[1:]
        self.sequences = 0
        self.first, self.entropy, self.outside = (_zeros(sums, heads) for _ in range(3))
        self.alpha, self.above = (_zeros(sums, heads, length) for _ in range(2))
        self.floor = _zeros(sums, length)
        self.by_token, self.uniform_by_token = (_zeros(sums, vocabulary) for _ in range(2))
        self.uniform_first, self.uniform_entropy = (_zeros(sums) for _ in range(2))
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
        """The keys with the largest α, of those that at least half of the queries see."""
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
        """Positions at which some heads have a sink over all sequences, with those heads.

        Positions after the first count only where four sequences or more, and nearly all, agree: a few cannot tell a
        position from the token that happens to stand there.
        """
        alpha = self.alpha[:, : max(1, self.length // 2)] / self.sequences
        floor = self.floor[: alpha.shape[1]] / self.sequences
        sink = (alpha > SINK) & (alpha > FLOORS * floor)
        agreed = self.above[:, : alpha.shape[1]] >= AGREED * self.sequences
        sink[:, 1:] &= agreed[:, 1:] & (self.sequences >= 4)
        return {k: sink[:, k].nonzero().flatten().tolist() for k in sink.any(0).nonzero().flatten().tolist()}

    def token_sinks(self, layer: int, text_of: Callable[[int], str]) -> list[TokenSink]:
        """Token ids that take more than 0.3 of the layer's attention in any place but the first."""
        queries = self.sequences * self.length
        share, floor = self.by_token / queries, self.uniform_by_token / queries
        ids = ((share > SINK) & (share > FLOORS * floor)).nonzero().flatten().tolist()
        return [
            TokenSink(layer=layer, token=i, text=text_of(i), attention=float(share[i]), uniform=float(floor[i]))
            for i in ids
        ]


def _zeros(sums: AttentionSums, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device=sums.received.device)
