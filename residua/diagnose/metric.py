"""The base class of all metrics, from running sums to a section of the page, and sums that metrics share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import Model as Model
from residua.diagnose.plots import Models as Models
from residua.diagnose.plots import Topic
from residua.diagnose.text import Sample
from residua.report import Bar, Cell, Column, Page, Spread, Track

LAST = 1000


class Finding(Frozen, from_attributes=True):
    """Something the user should know. `where` holds the numbers that locate it: dimension, layer, token, reader."""

    kind: str
    where: dict[str, int | list[int]]
    words: str


class NoKeys(Frozen):
    """The keys of a metric that adds nothing to diagnosis.json."""


@dataclass(frozen=True)
class Sentence:
    """A line for the summary. The summary has ten lines and fills them in order of `rank`, lowest first."""

    rank: int
    text: str


@dataclass(frozen=True)
class Explained:
    """The text that a card adds to the findings of one kind: place, certainty, remedy."""

    where: str
    sure: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class LayerTrack(Track):
    """A column in the picture of the models, with each model's cells by layer.

    The final norm counts as layer `model.layers`.
    """

    cells: Sequence[Mapping[int, Bar | Spread]]


class Metric:
    """A metric. An instance measures one model; class methods present the results.

    The order of calls: `add` for every batch, `facts`, `suspects`; then each layer is removed in turn; then `findings`.
    The class methods read a finished `ModelDiagnosis`, which may come from a file.

    keys: the keys it adds to a model in diagnosis.json, with their types. kinds: the kinds of findings it reports.
    defect: the name by which the summary reports their absence; empty if a healthy model may have them. columns: its
    columns in the table that compares several models. file_place, page_place: its place among the keys and on the page,
    lowest first. on_request: whether it is measured only with `--maps`.
    """

    keys: ClassVar[type[Frozen]] = NoKeys
    kinds: ClassVar[tuple[str, ...]] = ()
    defect: ClassVar[str] = ""
    columns: ClassVar[tuple[Column, ...]] = ()
    file_place: ClassVar[int] = LAST
    page_place: ClassVar[int] = LAST
    on_request: ClassVar[bool] = False

    def __init__(self, subject: Subject, sample: Sample) -> None:
        self.subject, self.sample = subject, sample
        self.skipped: list[str] = []  # measurements that were impossible, and why
        self.means: dict[Any, Mean] = defaultdict(Mean)  # by layer, sublayer, or any other key

    def add(self, observation: Observation) -> None:
        """Add one batch to the running sums. Keep them on the device: `float` would make the host wait."""

    def facts(self) -> Frozen:
        """The values of `keys`."""
        return self.keys()

    def suspects(self) -> Sequence[int]:
        """Sublayers that may be dead: each is removed individually, even if the budget only removes whole layers."""
        return ()

    def findings(self, model: Model) -> list[Finding]:
        """The findings to report. `model` holds the facts of all metrics and the costs of removal."""
        return []

    @classmethod
    def absence(cls, model: Model) -> str:
        """The defect that the summary reports as absent without such findings; empty if it was not measured."""
        return cls.defect

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        """The text that the card adds to these findings, which are all of one kind."""
        return Explained("; ".join(_numbers(finding) for finding in findings))

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        """The metric's columns in the picture of the models, layer by layer."""
        return ()

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        """Sentences for the summary."""
        return ()

    @classmethod
    def cells(cls, model: Model) -> Sequence[Cell]:
        """A model's row in the comparison, one cell for each of `columns`."""
        return ()

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        """The metric's sections of the page as data, each with a sentence that describes a healthy model."""
        return ()

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        """Add the metric's sections to the page; override this if a `Topic` is not enough."""
        for topic in cls.topics(models):
            topic.draw(page)


def _numbers(finding: Finding) -> str:
    """`dimension 5`, `layers 3, 4`."""
    shown = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in finding.where.items()}
    return ", ".join(f"{name} {number}" for name, number in shown.items())


def on_page(model: Model) -> list[type[Metric]]:
    """The metrics of a diagnosis in page order, which is also the order of findings."""
    return sorted(model.metrics, key=lambda metric: metric.page_place)


class Mean:
    """A running mean of tensors of one shape, summed on their device so that the host does not wait."""

    sum: Tensor
    count = 0

    def add(self, total: Tensor, count: int) -> None:
        """Add the sum of `count` tensors."""
        self.sum = self.sum + total.double() if self.count else total.double()
        self.count += count

    def value(self) -> Tensor:
        """The mean, on the CPU."""
        return self.sum.cpu() / self.count


LARGEST = 3


class Activation(Frozen):
    """One of the largest |h|, and its position. `text` is the token as text; empty in older files."""

    value: float
    dimension: int
    sequence: int
    position: int
    token: int
    text: str = ""


class Largest:
    """The three largest values of all batches, stored on their device until `facts`."""

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        """[3, 3] each: values, positions among all values so far, tokens."""
        self.sequences = 0
        self.length = self.width = 1

    def add(self, size: Tensor, tokens: Tensor) -> None:
        """Add a batch: `size` [B, T, C], non-negative, and its tokens [B, T]."""
        values, places = size.flatten().topk(min(LARGEST, size.numel()))
        assert not self.batches or (self.length, self.width) == size.shape[1:], "batches have one shape"
        self.length, self.width = size.shape[1:]
        shown = tokens.flatten().to(size.device)[places // self.width]
        before = self.sequences * self.length * self.width
        self.batches.append(torch.stack([part.double() for part in (values, places + before, shown)]))
        self.sequences += tokens.shape[0]

    def facts(self, sample: Sample) -> list[Activation]:
        """The values, largest first, with their tokens as text."""
        largest = sorted(torch.cat(self.batches, 1).T.tolist(), key=lambda one: -one[0])[:LARGEST]
        facts = []
        for value, place, token in largest:
            rest, dimension = divmod(int(place), self.width)
            sequence, position = divmod(rest, self.length)
            where = {"dimension": dimension, "sequence": sequence, "position": position}
            facts.append(Activation(value=value, **where, token=int(token), text=sample.text_of(int(token))))
        return facts
