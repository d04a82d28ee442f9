"""Streams of a multi-stream residual: how each turns along depth, how large it gets, and their similarity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Mean, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import (
    Part,
    Topic,
    after_layers,
    by_layer,
    layers_later,
    line,
    over,
    over_sublayers,
    reader_name,
    tab_each,
    tabs_each,
)
from residua.diagnose.sentences import listed
from residua.diagnose.text import Sample
from residua.model.gauges import cosines
from residua.ops._runtime.numeric import wide
from residua.report import theme
from residua.report.figures import Figure, curves

STILL = 0.05
"""A stream stands still if no two of its states are further apart than this fraction of a half turn."""


class StreamFacts(Frozen):
    """Streams as seen by reader `reader`: angular distance of each to itself one sublayer earlier (null: it is new),
    mean cosine between different streams, and the largest |s| of each. `earlier` holds, by stream, its angular distance
    to itself at every earlier reader in the list (null: it did not exist there). The last two are empty in older
    files."""

    reader: int
    angular_distance: list[float | None]
    similarity: float
    largest: list[float] = Field(default_factory=list)
    earlier: list[list[float | None]] = Field(default_factory=list)


class StreamKeys(Frozen):
    """Streams by reader."""

    streams: list[StreamFacts] = Field(default_factory=list)


class Streams(Metric):
    """Means over all tokens of the angles arccos(cos(s_i(l), s_i(m)))/π for every stream i and pair of readers l and m.
    Also the mean cosine between different streams at one reader, and max |s_i| over all tokens and channels."""

    keys = StreamKeys
    file_place, page_place = 75, 80

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        # `means` holds angles by stream, [readers, readers] from the stream's first reader on
        self.alike: dict[int, Mean] = defaultdict(Mean)
        self.largest: dict[int, Tensor] = {}

    def add(self, observation: Observation) -> None:
        for reader, streams in observation.streams.items():
            self._add_reader(reader, wide(streams))
        in_order = [streams for _, streams in sorted(observation.streams.items())]
        for i in range(max((streams.shape[-2] for streams in in_order), default=0)):
            rows = [streams[..., i, :].flatten(0, 1) for streams in in_order if streams.shape[-2] > i]
            for cosine in cosines(rows, Tensor.double):  # in float32, an unwritten stream appears to turn by 1e-4
                self.means[i].add((cosine.arccos() / torch.pi).sum(0), len(cosine))

    def _add_reader(self, reader: int, streams: Tensor) -> None:
        """Add the mean cosine between streams, and the largest |s| of each."""
        largest = streams.abs().amax((0, 1, 3)).double()
        self.largest[reader] = torch.maximum(self.largest[reader], largest) if reader in self.largest else largest
        count = streams.shape[-2]
        if count > 1:
            u = (streams / streams.norm(dim=-1, keepdim=True).clamp(min=1e-30)).double()
            total = u.sum(-2).square().sum(-1) - u.square().sum((-2, -1))
            self.alike[reader].add((total / (count * (count - 1))).sum(), streams.shape[:2].numel())

    def facts(self) -> StreamKeys:
        readers = sorted(self.alike)
        return StreamKeys(streams=[self._facts(place, reader) for place, reader in enumerate(readers)])

    def _facts(self, place: int, reader: int) -> StreamFacts:
        earlier = [self._earlier(i, place) for i in range(len(self.largest[reader]))]
        return StreamFacts(
            reader=reader,
            angular_distance=[row[-1] for row in earlier if row],
            similarity=float(self.alike[reader].value()),
            largest=self.largest[reader].tolist(),
            earlier=earlier,
        )

    def _earlier(self, stream: int, place: int) -> list[float | None]:
        """Distances to the readers before number `place`. A stream that starts late only exists at the last readers."""
        angles = self.means[stream].value()
        missing = len(self.alike) - len(angles)
        known: list[float] = angles[place - missing, : place - missing].tolist()
        return [*[None] * min(missing, place), *known]

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [s for s in model.streams if s.largest]
        if not known:
            return
        most = max(known, key=lambda s: max(s.largest))
        turns = _turns(model)
        still = [i for i, angle in turns.items() if angle < STILL]
        yield Sentence(
            65,
            f"The largest value of a stream is {max(most.largest):.4g}, in stream "
            f"{most.largest.index(max(most.largest))} as read by {reader_name(model, most.reader)}; "
            + (
                f"{listed('stream', still)} {'does' if len(still) == 1 else 'do'} not change."
                if still
                else f"every stream turns by {min(turns.values()):.2f} of a half turn or more."
            ),
        )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        similarity = over("streams", "similarity", "reader")
        alike = by_layer(models, similarity, "mean cosine between streams", x="as read by")
        yield Topic(
            "Streams",
            "Each stream on its own. Healthy: streams turn at different speeds and stay different from each other.",
            Part(
                tab_each(models, _turned),
                "Angular distance of each stream to itself one sublayer earlier; zero is a stream that "
                "nothing is written to.",
            ),
            Part(alike, "Healthy: well below 1; equal streams are one stream stored n times."),
            Part(
                tabs_each(models, _maps),
                "Angular distance arccos(cos)/π between a stream after layer ℓ and the same stream n layers later. "
                "Healthy: boundaries at different depths in different streams; a map near zero is a stream "
                "that does not change.",
                "Rotation of each stream",
            ),
            Part(
                tabs_each(models, _sizes),
                "Largest |s| over all tokens and channels, after each sublayer. Healthy: flat; a stream far above "
                "the others carries massive activations.",
                "Magnitude of each stream",
            ),
        )


def _turns(model: Model) -> dict[int, float]:
    """By stream, the largest angular distance between two of its states."""
    largest: dict[int, float] = {}
    for s in model.streams:
        for i, row in enumerate(s.earlier):
            largest[i] = max([largest.get(i, 0.0), *(d for d in row if d is not None)])
    return largest


def _turned(model: Model) -> Figure | None:
    """Angular distance of each stream to itself one sublayer earlier."""
    series = []
    for i in range(max((len(s.angular_distance) for s in model.streams), default=0)):
        rows = [(float(s.reader), s.angular_distance[i]) for s in model.streams if i < len(s.angular_distance)]
        points = [(reader, distance) for reader, distance in rows if distance is not None]
        series.append(line(f"stream {i}", points, theme.colour(i + 1)))
    owners, y = [model] * len(series), "angular distance to one earlier"
    return over_sublayers(series, owners, "as read by", y, height=340) if model.streams else None


def _maps(model: Model) -> dict[str, Figure | None]:
    """By stream, its angular distance between layer ℓ and n layers later."""
    place = {s.reader: index for index, s in enumerate(model.streams)}
    count = max((len(s.earlier) for s in model.streams), default=0)
    return {f"stream {i}": layers_later(model, _distance(model, place, i)) for i in range(count)}


def _distance(model: Model, place: Mapping[int, int], stream: int) -> Callable[[int, int], float | None]:
    """The angular distance of a stream between two readers; `one` comes before `other`."""

    def between(one: int, other: int) -> float | None:
        if one not in place or other not in place or stream >= len(model.streams[place[other]].earlier):
            return None
        distance: float | None = model.streams[place[other]].earlier[stream][place[one]]
        return distance

    return between


def _sizes(model: Model) -> dict[str, Figure | None]:
    """max |s_i| by layer, after its last sublayer (the feed-forward) and before it (after attention)."""
    largest = {s.reader: s.largest for s in model.streams if s.largest}

    def figure(readers: Mapping[int, int]) -> Figure | None:
        series = [
            line(f"stream {i}", points, theme.colour(i + 1))
            for i in range(max(map(len, largest.values()), default=0))
            if (points := [(float(n), largest[r][i]) for n, r in readers.items() if i < len(largest.get(r, []))])
        ]
        return curves(series, "layer", "largest |s|", log_y=True, whole_x=True, height=340) if series else None

    return {f"after {title}": figure(readers) for title, readers in after_layers(model).items()}
