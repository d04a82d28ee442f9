"""Attention sinks and entropy of softmax layers, each beside what uniform attention would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.attention import AttentionSums
from residua.diagnose.metric import Finding, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import NONE, add_figure, add_tabs, by_layer, numbers, padded
from residua.diagnose.sentences import listed, percent
from residua.diagnose.text import Sample
from residua.report import Column, Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

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


class AttentionKeys(Frozen):
    """Every softmax layer, and the token ids that draw attention."""

    attention: list[AttentionFacts] = Field(default_factory=list)
    token_sinks: list[TokenSink] = Field(default_factory=list)


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
        self.uniform_first = self.uniform_entropy = 0.0
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
        self.uniform_first += float(sums.uniform[:, 0].expand(batch).sum())
        self.uniform_entropy += float(sums.uniform_entropy.expand(batch).sum())
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
            uniform_first_token=self.uniform_first / queries,
            sink_rate=float(self.above[:, 0].mean() / self.sequences),
            entropy=float(self.entropy.mean() / queries),
            uniform_entropy=self.uniform_entropy / queries,
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


class Attention(Metric):
    """Attention sinks and attention entropy of all softmax layers."""

    keys = AttentionKeys
    kinds = ("attention_sink", "sink_token")
    defect = "attention sink"
    columns = (
        Column("first token", "mean attention to the first token, beside what uniform attention would give"),
        Column("sink heads", "share of heads whose mean attention to the first token exceeds 0.3"),
    )
    file_place, page_place = 50, 20

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.layers: dict[int, LayerSums] = {}

    def add(self, seen: Observation) -> None:
        for layer, sums in seen.attention.items():
            if layer not in self.layers:
                self.layers[layer] = LayerSums(sums, self.subject.vocabulary)
            self.layers[layer].add(sums, seen.tokens)

    def facts(self) -> AttentionKeys:
        layers = sorted(self.layers.items())
        return AttentionKeys(
            attention=[sums.facts(layer) for layer, sums in layers],
            token_sinks=[sink for layer, sums in layers for sink in sums.token_sinks(layer, self.sample.text_of)],
        )

    def findings(self, model: Model) -> list[Finding]:
        return [*_attention_sinks(self.layers), *_token_sinks(model.token_sinks)]

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.attention:
            first, floor, entropy, ceiling, learned = (
                _mean(model, key)
                for key in ("first_token", "uniform_first_token", "entropy", "uniform_entropy", "learned_sink")
            )
            beside = f", {percent(learned)} on the learned sink" if learned > 0 else ""
            yield Sentence(
                10,
                f"The first token gets {percent(first)} of attention on average (uniform {percent(floor)}){beside}; "
                f"entropy is {entropy:.2f} nats of {ceiling:.2f} possible.",
            )

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        if not model.attention:
            return [NONE, NONE]
        first, floor = _mean(model, "first_token"), _mean(model, "uniform_first_token")
        return [f"{percent(first)} (uniform {percent(floor)})", percent(_mean(model, "sink_rate"))]

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        first = _first_token(models)
        if first is None:
            return
        section = page.section(
            "Attention sinks",
            "How much attention goes to the first token. Healthy: near the dotted line, which uniform attention would "
            "give; far above it, heads park attention there because they have nothing to look at.",
        )
        views = {"first token": first, "share of sink heads": _sink_rate(models), "learned sink": _learned_sink(models)}
        add_tabs(section, views, "A sink head gives the first token more than 0.3 of its attention on average.")
        section.subheading("Every head")
        section.tabs(_heads(models), "Mean attention to the first token. Healthy: near zero everywhere.")
        sinks = [sink for model in models for sink in model.token_sinks]
        if sinks:
            section.subheading("Tokens that are sinks wherever they stand")
            section.table(
                [Column("token", numeric=False), Column("id"), Column("layer"), Column("attention"), Column("uniform")],
                [[repr(s.text), str(s.token), str(s.layer), percent(s.attention), percent(s.uniform)] for s in sinks],
            )
        spread = page.section(
            "Attention entropy",
            "How widely a query looks. Healthy: between zero (one token only) and the dotted line (all alike), and "
            "different from layer to layer.",
        )
        add_figure(spread, _entropy(models))


def _mean(model: Model, key: str) -> float:
    """The mean over the softmax layers."""
    values: list[float] = [getattr(layer, key) for layer in model.attention]
    return sum(values) / len(values)


def _attention_sinks(layers: dict[int, LayerSums]) -> list[Finding]:
    """One finding per position: the layers and heads that park their attention there."""
    found: dict[int, dict[int, list[int]]] = {}
    for layer, sums in sorted(layers.items()):
        for position, heads in sums.sink_heads().items():
            found.setdefault(position, {})[layer] = heads
    return [_attention_sink(position, where, layers) for position, where in sorted(found.items())]


def _attention_sink(position: int, where: dict[int, list[int]], layers: dict[int, LayerSums]) -> Finding:
    strongest = max(where, key=lambda layer: float(layers[layer].alpha[:, position].mean()))
    sums = layers[strongest]
    mass = float(sums.alpha[:, position].mean() / sums.sequences)
    floor = float(sums.floor[position] / sums.sequences)
    heads = sum(len(heads) for heads in where.values())
    total = sum(len(sums.first) for sums in layers.values())
    place = "the first token" if position == 0 else f"position {position}"
    return Finding(
        kind="attention_sink",
        where={"position": position, "layers": list(where)},
        words=f"{place} is an attention sink for {heads} of {total} heads, in {listed('layer', list(where))}: layer "
        f"{strongest} gives it {percent(mass)} of its attention where uniform attention would give {percent(floor)}",
    )


def _token_sinks(sinks: Sequence[TokenSink]) -> list[Finding]:
    """One finding per token id."""
    found = []
    for token in dict.fromkeys(sink.token for sink in sinks):
        own = [sink for sink in sinks if sink.token == token]
        strongest = max(own, key=lambda sink: sink.attention)
        found.append(
            Finding(
                kind="sink_token",
                where={"token": token, "layers": [sink.layer for sink in own]},
                words=f"token {strongest.text!r} (id {token}) is an attention sink wherever it stands, in "
                f"{listed('layer', [sink.layer for sink in own])}: {percent(strongest.attention)} of layer "
                f"{strongest.layer}'s attention, uniform {percent(strongest.uniform)}",
            )
        )
    return found


def _first_token(models: Models) -> Figure | None:
    highest = max((a.first_token for m in models for a in m.attention), default=0.0)
    return by_layer(
        models,
        lambda m: [(a.layer, a.first_token) for a in m.attention],
        "attention to the first token",
        floor=lambda m: [(a.layer, a.uniform_first_token) for a in m.attention],
        bounds=(0.0, max(0.1, 1.1 * highest)),
    )


def _sink_rate(models: Models) -> Figure | None:
    return by_layer(models, lambda m: [(a.layer, a.sink_rate) for a in m.attention], "share of heads above 0.3")


def _learned_sink(models: Models) -> Figure | None:
    shown = [m for m in models if any(a.learned_sink > 0 for a in m.attention)]
    return by_layer(shown, lambda m: [(a.layer, a.learned_sink) for a in m.attention], "attention to the learned sink")


def _entropy(models: Models) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(a.layer, a.entropy) for a in m.attention],
        "entropy (nats)",
        floor=lambda m: [(a.layer, a.uniform_entropy) for a in m.attention],
    )


def _heads(models: Models) -> dict[str, Figure]:
    """Attention to the first token of every head."""
    found = {}
    for model in models:
        if model.attention:
            count = max(len(a.heads) for a in model.attention)
            rows = [padded([h.first_token for h in a.heads], count) for a in model.attention]
            names = [str(a.layer) for a in model.attention]
            found[model.name] = heatmap(rows, numbers(count), names, "head", "layer", "attention", bounds=(0.0, 1.0))
    return found
