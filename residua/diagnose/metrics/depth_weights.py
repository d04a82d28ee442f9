"""Depth weights: from which sources each reader takes its input, and the value of that choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.metric import Explained, Finding, LayerTrack, Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation
from residua.diagnose.plots import LABELS, NONE, Part, Topic, colours, label_step, padded, tab_each, tabs_each
from residua.ops._runtime.numeric import wide
from residua.report import Column, Spread
from residua.report.figures import Figure, grouped_bars, heatmap

SHOWN = 4
SUM_TOLERANCE = 0.01
"""Weights that add up to 1 within this tolerance are shares; the means of 16-bit weights are off by less."""


class ReaderFacts(Frozen):
    """Mean depth weights of one reader over its sources; `initial` is the only source that an untrained model reads."""

    reader: int
    name: str
    sources: list[str]
    initial: int | None = None
    mean: list[float]


class BlockFacts(Frozen):
    """Mean depth weights of the readers of one block, or of one layer if every output is a source. `mean` holds the
    weight on each block, summed over its sources. A source that a reader does not see has weight 0."""

    name: str
    readers: list[int]
    sources: list[str]
    mean: list[float]


class DepthWeightKeys(Frozen):
    """Every reader that weights its sources; the same by block, empty in older files and without blocks."""

    depth_weights: list[ReaderFacts] = Field(default_factory=list)
    depth_blocks: list[BlockFacts] = Field(default_factory=list)


class DepthWeights(Metric):
    """Means over all tokens, by reader."""

    keys = DepthWeightKeys
    kinds = ("depth_routing",)
    columns = (Column("uniform depth", "loss change in nats if every reader weighted all sources equally"),)
    file_place, page_place = 60, 5

    def add(self, observation: Observation) -> None:
        for reader, weights in observation.weights.items():
            self.means[reader].add(wide(weights).double().flatten(0, 1).sum(0), observation.tokens.numel())

    def facts(self) -> DepthWeightKeys:
        readers = [self._reader(*entry) for entry in sorted(self.means.items())]
        return DepthWeightKeys(depth_weights=readers, depth_blocks=self._blocks({r.reader: r.mean for r in readers}))

    def _reader(self, reader: int, weights: Mean) -> ReaderFacts:
        mean: list[float] = weights.value().tolist()
        return ReaderFacts(
            reader=reader,
            name=self.subject.reader_name(reader),
            sources=[self.subject.names.source(reader, i) for i in range(len(mean))],
            initial=self.subject.names.initial(reader),
            mean=mean,
        )

    def _blocks(self, means: Mapping[int, Sequence[float]]) -> list[BlockFacts]:
        """Return one entry per block that reads, in depth order, and one for the final norm."""
        block_of_reader, block_of_source = self.subject.names.block_of_reader, self.subject.names.block_of_source
        if not means or block_of_reader is None or block_of_source is None:
            return []
        rows: dict[str, dict[int, Sequence[float]]] = defaultdict(dict)
        # before the first output, only the embedding can be read
        for reader, mean in sorted({0: [1.0], **means}.items()):
            inside = reader < len(self.subject.sites)
            rows[block_of_reader(reader) if inside else self.subject.reader_name(reader)][reader] = mean
        blocks = []
        for name, readers in rows.items():
            total: dict[str, float] = defaultdict(float)
            for reader, mean in readers.items():
                for source, weight in enumerate(mean):
                    total[block_of_source(reader, source)] += weight
            means_by_block = [weight / len(readers) for weight in total.values()]
            blocks.append(BlockFacts(name=name, readers=list(readers), sources=list(total), mean=means_by_block))
        return blocks

    def findings(self, model: Model) -> list[Finding]:
        """Readers that learned to take most of their input from one source: over halfway from uniform to everything.

        If weights are factors, their absolute values are compared. A reader's initial source is not reported.
        """
        uniform = {a.index: a.change for a in model.ablations if a.kind == "uniform"}
        shares = are_shares(model.depth_weights)
        findings = []
        for reader in model.depth_weights:
            count, best = len(reader.mean), _best(reader)
            weight, total = reader.mean[best], sum(map(abs, reader.mean))
            if count < 2 or best == reader.initial or abs(weight) < (0.5 + 0.5 / count) * (1.0 if shares else total):
                continue
            words = (
                f"{reader.name} reads mostly {reader.sources[best]}: weight {weight:.2f} of {count} sources "
                f"(uniform {1 / count:.2f})"
                if shares
                else f"{reader.name} multiplies {reader.sources[best]} by {weight:.2f}; the factors of its other "
                f"sources have a total size of {total - abs(weight):.2f}"
            )
            if reader.reader in uniform:
                words += f"; uniform weights there change the loss by {uniform[reader.reader]:+.4f}"
            where = {"reader": reader.reader, "source": best}
            findings.append(Finding(kind="depth_routing", where=where, words=words))
        return findings

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        wanted = [f.where["reader"] for f in findings]
        readers = [r for r in model.depth_weights if r.reader in wanted]
        costs = [a.change for a in model.ablations if a.kind == "uniform" and a.index in wanted]
        sure = f"A mean over {model.text.tokens:,} tokens."
        if costs:
            sure += (
                f" Uniform weights there change the loss by {max(costs, key=abs):+.4f} nats"
                f"{'' if len(costs) == 1 else ' at most'}, on {model.ablation_tokens:,} tokens."
            )
        return Explained(
            "; ".join(f"{r.name} ← {r.sources[_best(r)]}" for r in readers[:SHOWN])
            + (f"; and {len(readers) - SHOWN} more" if len(readers) > SHOWN else ""),
            sure,
            "Nothing to repair. Where uniform weights cost nothing, learned weights are not worth their time.",
        )

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        factors = any(not are_shares(model.depth_weights) for model in models)
        yield LayerTrack(
            "reads",
            "first source to last",
            "Depth weights of the layer's readers, attention above and feed-forward below: darker means "
            "that more is read from that source. The number is the largest weight."
            + (f" {FACTORS} They are marked ×, and the darkest is the model's largest." if factors else ""),
            [_reads(model) for model in models],
        )

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        changes = [a.change for a in model.ablations if a.kind == "uniform" and a.index == -1]
        return [f"{changes[0]:+.4f}" if changes else NONE]

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        for everywhere in (a for a in model.ablations if a.kind == "uniform" and a.index == -1):
            yield Sentence(30, f"Uniform depth weights everywhere would change the loss by {everywhere.change:+.4f}.")

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        if not any(m.depth_weights for m in models):
            return
        remarks = [
            f"{m.name}: a reader's weights add up to between {min(sums):.2f} and {max(sums):.2f}. {FACTORS}"
            for m in models
            if not are_shares(m.depth_weights) and (sums := [sum(r.mean) for r in m.depth_weights])
        ]
        yield Topic(
            "Depth weights",
            "Which reader uses which source. Healthy: structure, such as a strong diagonal and a few distant "
            "sources; a uniform map has not learned to choose.",
            Part(tab_each(models, _map), "Mean over tokens. Each row is one reader."),
            *map(Part, remarks),
            Part(
                tab_each(models, lambda m: _block_map(m.depth_blocks) if m.depth_blocks else None),
                "Each row is the mean over tokens and over the readers of one block. Where every output is a "
                "source, rows are layers, and the weights on the two outputs of a layer are added. A block's "
                "weight on itself is the weight on its sum so far; its first reader has no such sum, which counts "
                "as 0. The first sublayer of the model reads only the embedding.",
                "Block by block",
            ),
            Part(
                _costs(models),
                "Routing mass is not importance: this is the loss change when a source is hidden from every "
                "reader, or when a reader's weights are made uniform. Healthy: removing sources with large weights "
                "costs something.",
                "Value of the weights",
            ),
        )


FACTORS = "Weights that do not add up to 1 are factors on the sources, not shares of the input."


def are_shares(readers: Sequence[ReaderFacts]) -> bool:
    """Return whether the weights are shares: none is negative, and each reader's add up to 1."""
    return all(min(r.mean) >= 0 and abs(sum(r.mean) - 1) <= SUM_TOLERANCE for r in readers)


def _best(reader: ReaderFacts) -> int:
    """The source with the largest absolute weight."""
    return max(range(len(reader.mean)), key=lambda i: abs(reader.mean[i]))


def _reads(model: Model) -> dict[int, Spread]:
    """By layer, the weights of its readers; the final norm's are under `model.layers`."""
    routed = {f.where["reader"]: f.words for f in model.findings if f.kind == "depth_routing"}
    layers = {r.reader: model.sites[r.reader].layer if r.reader < len(model.sites) else model.layers
              for r in model.depth_weights}  # fmt: skip
    width = max((len(r.mean) for r in model.depth_weights), default=1)
    shares = are_shares(model.depth_weights)
    darkest = 1.0 if shares else max(_largest(r) for r in model.depth_weights)
    spreads = {}
    for layer in dict.fromkeys(layers.values()):
        reads = [r for r in model.depth_weights if layers[r.reader] == layer]
        words = "; ".join(routed[r.reader] for r in reads if r.reader in routed)
        spreads[layer] = Spread(
            tuple(tuple(abs(weight) / darkest for weight in r.mean) for r in reads),
            width,
            f"{'' if shares else '×'}{max((r.mean[_best(r)] for r in reads), key=abs):.2f}",
            flag="note" if words else "",
            words=words or "; ".join(f"{r.name} reads most from {r.sources[_best(r)]}" for r in reads),
        )
    return spreads


def _largest(reader: ReaderFacts) -> float:
    return abs(reader.mean[_best(reader)])


def _map(model: Model) -> Figure | None:
    """Reader × source."""
    if not model.depth_weights:
        return None
    widest = max(model.depth_weights, key=lambda r: len(r.mean))
    rows = [padded(r.mean, len(widest.mean)) for r in model.depth_weights]
    high, signed = max(map(_largest, model.depth_weights)), any(min(r.mean) < 0 for r in model.depth_weights)
    return heatmap(
        rows, widest.sources, [r.name for r in model.depth_weights], "source", "read by",
        "mean weight" if are_shares(model.depth_weights) else "mean factor",
        bounds=(-high if signed else 0.0, high), diverging=signed, height=min(190 + 24 * len(rows), 760),
    )  # fmt: skip


def _block_map(blocks: Sequence[BlockFacts]) -> Figure:
    """Reading block × source block; cells of later blocks are empty."""
    sources = list(dict.fromkeys(source for block in blocks for source in block.sources))
    weights = [dict(zip(block.sources, block.mean, strict=True)) for block in blocks]
    return heatmap(
        [[row.get(source) for source in sources] for row in weights], sources, [block.name for block in blocks],
        "source", "read by", "mean weight", bounds=(0.0, max(max(block.mean) for block in blocks)),
        height=min(190 + 24 * len(blocks), 760),
    )  # fmt: skip


def _costs(models: Models) -> dict[str, Figure | None]:
    """The value of the weights: loss change without a source, without a stream, and with uniform weights."""
    titles = {"source": "source removed", "stream": "stream removed", "uniform": "weights made uniform"}
    colour = dict(zip((m.name for m in models), colours(models), strict=True))

    def bars(model: Model, kind: str) -> Figure | None:
        removed = [a for a in model.ablations if a.kind == kind]
        labels = [a.label.replace("uniform weights at ", "") for a in removed]
        parts, step = {titles[kind]: [a.change for a in removed]}, label_step(len(removed), 2 * LABELS)
        of = [colour[model.name]]
        return grouped_bars(labels, parts, of, "loss change (nats)", line_at=0.0, step=step) if removed else None

    return tabs_each(models, lambda m: {title: bars(m, kind) for kind, title in titles.items()})
