"""Attention sinks and entropy of softmax layers, compared with uniform attention; learned sinks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.attention import SINK, AttentionFacts, LayerSums, TokenSink, learned_sinks
from residua.diagnose.metric import Explained, Finding, LayerTrack, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import NONE, Part, Points, Table, Topic, by_layer, numbers, over, owners, padded, tab_each
from residua.diagnose.sentences import listed, percent, sureness, token
from residua.diagnose.text import Sample
from residua.report import Bar, Cell, Column, Value
from residua.report.figures import Figure, heatmap


class AttentionKeys(Frozen):
    """Every softmax layer, and the token ids that attract attention."""

    attention: list[AttentionFacts] = Field(default_factory=list)
    token_sinks: list[TokenSink] = Field(default_factory=list)


class Attention(Metric):
    """Attention sinks and attention entropy of all softmax layers."""

    keys = AttentionKeys
    kinds = ("attention_sink", "sink_token")
    defect = "attention sink"
    columns = (
        Column("first token", "mean attention to the first token, next to that of uniform attention"),
        Column("sink heads", "share of heads whose mean attention to the first token exceeds 0.3"),
        Column("entropy", "of attention, mean in nats, next to its maximum"),
    )
    file_place, page_place = 50, 20

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.layers: dict[int, LayerSums] = {}

    def add(self, observation: Observation) -> None:
        for layer, sums in observation.attention.items():
            if layer not in self.layers:
                self.layers[layer] = LayerSums(sums, self.subject.vocabulary)
            self.layers[layer].add(sums, observation.tokens)

    def facts(self) -> AttentionKeys:
        layers = sorted(self.layers.items())
        return AttentionKeys(
            attention=[sums.facts(layer) for layer, sums in layers],
            token_sinks=[sink for layer, sums in layers for sink in sums.token_sinks(layer, self.sample.text_of)],
        )

    def findings(self, model: Model) -> list[Finding]:
        by_position: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for layer, sums in sorted(self.layers.items()):
            for position, heads in sums.sink_heads().items():
                by_position[position][layer] = heads
        sinks = [_attention_sink(position, where, self.layers) for position, where in sorted(by_position.items())]
        return [*sinks, *_token_sinks(model.token_sinks)]

    @classmethod
    def absence(cls, model: Model) -> str:
        return f"{cls.defect} on a token" if learned_sinks(model.attention) else cls.defect

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        layers = sorted({layer for f in findings for layer in _layers(f)})
        if findings[0].kind == "sink_token":
            sinks = [s for s in model.token_sinks if s.token in [f.where["token"] for f in findings]]
            what = ", ".join(dict.fromkeys(token(s.text, s.token) for s in sinks))
            strongest = max((s.attention for s in sinks), default=SINK)
            remedy = (
                "Heads park attention on it; it is often an end of text or a line break. A gate "
                "(model.attention.gate=elementwise) or a learned sink (model.attention.sink=learned) removes the need."
            )
        else:
            positions = [f.where["position"] for f in findings]
            what = ", ".join("the first token" if p == 0 else f"position {p}" for p in positions)
            strongest = max((_strongest(a, positions) for a in model.attention if a.layer in layers), default=SINK)
            remedy = (
                "Harmless for the loss itself, but sinks come with outliers that are costly in low precision. "
                "To avoid them, train with a gate (model.attention.gate=elementwise) or a learned sink "
                "(model.attention.sink=learned)."
            )
        measured = f"up to {percent(strongest)} of attention, above the threshold of {percent(SINK)}"
        return Explained(f"{what}, in {listed('layer', layers)}", sureness(measured, strongest / SINK, model), remedy)

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        yield LayerTrack(
            "sink",
            "0 to 100 %",
            "Attention to the first token, or to another sink: strongest head above, mean of all heads "
            "below. The line is uniform attention.",
            [_sinks(model) for model in models],
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.attention:
            first, floor, entropy, ceiling, learned = _means(model)
            beside = f", {percent(learned)} on the learned sink" if learned > 0 else ""
            yield Sentence(
                10,
                f"The first token gets {percent(first)} of attention on average (uniform {percent(floor)}){beside}; "
                f"entropy is {entropy:.2f} nats of {ceiling:.2f} possible.",
            )

    @classmethod
    def cells(cls, model: Model) -> Sequence[Cell]:
        if not model.attention:
            return [NONE, NONE, NONE]
        first, floor, entropy, ceiling, _ = _means(model)
        return [
            Value(percent(first), f"uniform {percent(floor)}"),
            percent(_mean(a.sink_rate for a in model.attention)),
            Value(f"{entropy:.2f}", f"of {ceiling:.2f}"),
        ]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        highest = max((a.first_token for m in models for a in m.attention), default=0.0)
        first = by_layer(
            models, over("attention", "first_token"), "attention to the first token",
            floor=over("attention", "uniform_first_token"), bounds=(0.0, max(0.1, 1.1 * highest)),
        )  # fmt: skip
        rate = by_layer(models, over("attention", "sink_rate"), "share of heads above 0.3")
        learned = by_layer(models, _learned, "attention to the learned sink")
        rows: list[list[Cell]] = [
            [owner, token(s.text, s.token), str(s.layer), percent(s.attention), percent(s.uniform)]
            for m, owner in zip(models, owners(models), strict=True)
            for s in m.token_sinks
        ]
        yield Topic(
            "Attention sinks",
            "How much attention goes to the first token. Healthy: near the dotted line, which uniform attention would "
            "give; far above it, heads park attention there because they find nothing to attend to.",
            Part(
                {"first token": first, "share of sink heads": rate, "learned sink": learned},
                "A sink head gives the first token more than 0.3 of its attention on average.",
            ),
            Part(
                tab_each(models, _heads),
                "Mean attention to the first token. Healthy: near zero everywhere.",
                "Every head",
            ),
            Part(
                Table([Column("token", numeric=False), Column("layer"), Column("attention"), Column("uniform")], rows),
                heading="Tokens that are sinks at any position",
            ),
        )
        floor = over("attention", "uniform_entropy")
        entropy = by_layer(models, over("attention", "entropy"), "entropy (nats)", floor=floor)
        yield Topic(
            "Attention entropy",
            "How widely a query attends. Healthy: between zero (a single token) and the dotted line (all "
            "tokens equally), and different from layer to layer.",
            Part(entropy),
        )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _means(model: Model) -> tuple[float, ...]:
    """Means over softmax layers: first-token attention, its uniform value, entropy, its ceiling, learned sink's
    share."""
    rows = [
        (a.first_token, a.uniform_first_token, a.entropy, a.uniform_entropy, a.learned_sink) for a in model.attention
    ]
    return tuple(map(_mean, zip(*rows, strict=True)))


def _layers(finding: Finding) -> list[int]:
    layers = finding.where["layers"]
    return layers if isinstance(layers, list) else [layers]


def _strongest(layer: AttentionFacts, positions: Sequence[int | list[int]]) -> float:
    """The most attention from one head to the first token, or from all heads to another of these positions."""
    heads = [head.first_token for head in layer.heads] if 0 in positions else []
    return max([*heads, *(p.attention for p in layer.positions if p.position in positions)], default=0.0)


def _sinks(model: Model) -> dict[int, Bar]:
    """By layer, attention to the first token, or to the detected sink."""
    findings = [f for f in model.findings if f.kind in ("attention_sink", "sink_token")]
    bars = {}
    for a in model.attention:
        in_layer = [f for f in findings if a.layer in _layers(f)]
        elsewhere = [
            *(p.attention for p in a.positions if p.position in [f.where.get("position") for f in in_layer]),
            *(s.attention for s in model.token_sinks if s.layer == a.layer),
        ]
        strongest = max([*(head.first_token for head in a.heads), *elsewhere])
        mean = max(a.first_token, *elsewhere, 0.0)
        bars[a.layer] = Bar(
            (strongest, mean),
            percent(strongest),
            mark=a.uniform_first_token,
            flag="bad" if in_layer else "",
            words="; ".join(f.words for f in in_layer)
            or f"first token: strongest head {percent(strongest)}, mean {percent(mean)}, uniform "
            f"{percent(a.uniform_first_token)}",
        )
    return bars


def _attention_sink(position: int, where: dict[int, list[int]], layers: dict[int, LayerSums]) -> Finding:
    """Report a position with the layers and heads that park their attention there."""
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
    findings = []
    for number in dict.fromkeys(sink.token for sink in sinks):
        same = [sink for sink in sinks if sink.token == number]
        strongest = max(same, key=lambda sink: sink.attention)
        findings.append(
            Finding(
                kind="sink_token",
                where={"token": number, "layers": [sink.layer for sink in same]},
                words=f"token {token(strongest.text, number)} is an attention sink at any position, in "
                f"{listed('layer', [sink.layer for sink in same])}: {percent(strongest.attention)} of layer "
                f"{strongest.layer}'s attention, uniform {percent(strongest.uniform)}",
            )
        )
    return findings


def _learned(model: Model) -> Points:
    """By layer, attention to the learned sink; empty if there is none."""
    points = [(float(a.layer), a.learned_sink) for a in model.attention]
    return points if any(mass > 0 for _, mass in points) else []


def _heads(model: Model) -> Figure | None:
    """Attention to the first token of every head."""
    if not model.attention:
        return None
    count = max(len(a.heads) for a in model.attention)
    rows = [padded([h.first_token for h in a.heads], count) for a in model.attention]
    names = [str(a.layer) for a in model.attention]
    return heatmap(rows, numbers(count), names, "head", "layer", "attention", bounds=(0.0, 1.0))


class LearnedSink(Metric):
    """The layers whose mean attention to the learned sink exceeds 0.3. `Attention` stores the numbers."""

    kinds = ("learned_sink",)
    page_place = 21

    def findings(self, model: Model) -> list[Finding]:
        layers = learned_sinks(model.attention)
        if not layers:
            return []
        strongest = max((a for a in model.attention if a.layer in layers), key=lambda a: a.learned_sink)
        return [
            Finding(
                kind="learned_sink",
                where={"layers": layers},
                words=f"the learned sink takes as much attention as a sink in {listed('layer', layers)}: "
                f"{percent(strongest.learned_sink)} of layer {strongest.layer}'s",
            )
        ]

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        strongest = max(a.learned_sink for a in model.attention)
        return Explained(
            listed("layer", learned_sinks(model.attention)),
            sureness(f"up to {percent(strongest)}, above the threshold of {percent(SINK)}", strongest / SINK, model),
            "Nothing: this is the purpose of a learned sink. Heads park attention there instead of on a token.",
        )
