"""States, what each sublayer reads: their size, massive activations, similarity of tokens, dimensionality."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Finding, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import add_figure, by_layer
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Column, Page

CORE_VARIANCE = 0.99
COVARIANCE_BYTES = 512 << 20
LARGEST = 3
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""Sun et al. (arXiv 2402.17762): |h| above 100 and about a thousand times the median."""


class Activation(Frozen):
    """One of the largest |h|, and where it stood."""

    value: float
    dimension: int
    sequence: int
    position: int
    token: int


class StateFacts(Frozen):
    """What one sublayer reads (the last entry: the final norm)."""

    index: int
    name: str
    rms: float
    median: float
    largest: list[Activation]
    token_similarity: float
    input_similarity: float
    core_features: int | None = None


class StateKeys(Frozen):
    """Every state in order of depth."""

    states: list[StateFacts]


class StateSums:
    """Running sums over one state [B, T, C], the input of one sublayer, in float64.

    rms: sqrt(mean h²). median: mean over tokens of the (lower) median of |h|. The three largest |h|. Token similarity:
    the mean cosine of two different tokens of a sequence, (‖Σ u_i‖² − Σ ‖u_i‖²)/(T(T−1)) with u = h/‖h‖. Input
    similarity: the cosine of the whole sequence [T·C] with the first state's.
    """

    def __init__(self) -> None:
        self.tokens = self.sequences = 0
        self.squares = self.medians = self.token_similarity = self.input_similarity = 0.0
        self.largest: list[Activation] = []

    def add(self, seen: Observation, state: int, first: Tensor) -> None:
        h, tokens = wide(seen.states[state]), seen.tokens
        self.squares += float(seen.mean_square(state).sum())
        self.medians += float(seen.median(state).double().sum())
        self._note_largest(h.abs(), tokens)
        self.token_similarity += float(token_similarity(h).sum())
        self.input_similarity += float(torch.cosine_similarity(h.flatten(1), wide(first).flatten(1), -1).double().sum())
        self.tokens += tokens.numel()
        self.sequences += tokens.shape[0]

    def _note_largest(self, size: Tensor, tokens: Tensor) -> None:
        values, places = size.flatten().topk(min(LARGEST, size.numel()))
        length, width = size.shape[1:]
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            row, rest = divmod(place, length * width)
            position, dimension = divmod(rest, width)
            token = int(tokens[row, position])
            self.largest.append(Activation(
                value=value, dimension=dimension, sequence=self.sequences + row, position=position, token=token
            ))  # fmt: skip
        self.largest = sorted(self.largest, key=lambda a: -a.value)[:LARGEST]


def token_similarity(h: Tensor) -> Tensor:
    """Mean cosine over pairs of different tokens of each sequence, [B]; 1 for a sequence of one."""
    u: Tensor = (h / h.norm(dim=-1, keepdim=True).clamp(min=1e-30)).double()
    length = h.shape[1]
    if length == 1:
        return torch.ones(h.shape[0], dtype=torch.float64)
    return (u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (length * (length - 1))


class CoreFeatures:
    """PCA: the least k for which the k largest eigenvalues of the covariance hold 99 % of its trace.

    Second moments are summed about the first batch's mean, so that a large constant dimension costs no precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self.centre: Tensor | None = None
        self.sum: Tensor | None = None
        self.square: Tensor | None = None

    def add(self, state: Tensor) -> None:
        x = wide(state).flatten(0, 1)
        if self.centre is None:
            self.centre = x.mean(0)
        x = x - self.centre
        total, square = x.double().sum(0), (x.T @ x).double()
        self.sum = total if self.sum is None else self.sum + total
        self.square = square if self.square is None else self.square + square
        self.count += x.shape[0]

    def result(self) -> int:
        assert self.sum is not None and self.square is not None
        mean = self.sum / self.count
        covariance = self.square / self.count - mean[:, None] * mean[None]
        if not torch.isfinite(covariance).all():
            raise ValueError("hidden states overflow although every weight is finite: some weights are too large.")
        values = torch.linalg.eigvalsh(covariance).clamp(min=0).flip(0)
        share = values.cumsum(0) / values.sum().clamp(min=1e-300)
        return int((share < CORE_VARIANCE - 1e-12).sum()) + 1


class States(Metric):
    """Every state of a model; states are numbered 0 … sites, the last being the final norm's input."""

    keys = StateKeys
    kinds = ("massive_activation",)
    defect = "massive activation"
    columns = (Column("largest |h|", "over all tokens and sublayers"),)
    file_place, page_place = 20, 40

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        count = len(subject.sites) + 1
        self.sums: dict[int, StateSums] = {}
        self.core = {k: CoreFeatures() for k in _affordable(count, subject.width)}

    def add(self, seen: Observation) -> None:
        present = sorted(seen.states)
        first = seen.states[present[0]]
        for k in present:
            self.sums.setdefault(k, StateSums()).add(seen, k, first)
            if k in self.core:
                self.core[k].add(seen.states[k])

    def facts(self) -> StateKeys:
        return StateKeys(states=[self._state(k, sums) for k, sums in sorted(self.sums.items())])

    def _state(self, k: int, sums: StateSums) -> StateFacts:
        core = self.core.get(k)
        return StateFacts(
            index=k,
            name=self.subject.reader_name(k),
            rms=(sums.squares / sums.tokens) ** 0.5,
            median=sums.medians / sums.tokens,
            largest=sums.largest,
            token_similarity=sums.token_similarity / sums.sequences,
            input_similarity=sums.input_similarity / sums.sequences,
            core_features=None if core is None else core.result(),
        )

    def findings(self, model: Model) -> list[Finding]:
        return _massive_activations(model.states)

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [s for s in model.states if s.core_features is not None]
        if known:
            least = min(known, key=lambda s: s.core_features or 0)
            yield Sentence(
                70,
                f"99 % of the variance needs {least.core_features} of {model.width} dimensions at the narrowest, "
                f"before {least.name}; tokens of a sequence are {model.states[-1].token_similarity:.2f} alike at the "
                "end (mean cosine).",
            )

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        return [f"{max(s.largest[0].value for s in model.states):.4g}"]

    @classmethod
    def draw(cls, page: Page, models: Models) -> None:
        section = page.section(
            "Massive activations",
            "The largest single |h| before each sublayer, and the median for comparison. Healthy: within two orders of "
            "magnitude; a thousand times the median, at one or two tokens, is a massive activation.",
        )
        largest = by_layer(
            models,
            lambda m: [(s.index, s.largest[0].value) for s in m.states],
            "largest |h|",
            floor=lambda m: [(s.index, max(s.median, 1e-12)) for s in m.states],
            floor_name="median |h|",
            log=True,
            x="read by sublayer",
        )
        add_figure(section, largest)
        tops = [(m, max(m.states, key=lambda s: s.largest[0].value)) for m in models]
        section.table(
            [Column("model", numeric=False), Column("read by", numeric=False)]
            + [Column(title) for title in ("|h|", "dimension", "sequence", "position", "token id")],
            [
                [m.name, s.name, f"{a.value:.4g}", str(a.dimension), str(a.sequence), str(a.position), str(a.token)]
                for m, s in tops
                for a in s.largest
            ],
        )


def _affordable(states: int, width: int) -> list[int]:
    """States, evenly spread, whose covariance matrices fit the budget; always the first and the last."""
    count = max(2, min(states, COVARIANCE_BYTES // (8 * width * width)))
    return sorted({round(i * (states - 1) / (count - 1)) for i in range(count)})


def _massive_activations(states: Sequence[StateFacts]) -> list[Finding]:
    """One finding per dimension with single values above 100 and a thousand medians."""
    found: dict[int, tuple[float, StateFacts, int]] = {}
    for state in states:
        for a in state.largest:
            above = a.value > MASSIVE and a.value > MASSIVE_RATIO * state.median
            if above and a.value > found.get(a.dimension, (0.0,))[0]:
                found[a.dimension] = (a.value, state, a.position)
    return [
        Finding(
            kind="massive_activation",
            where={"dimension": dimension},
            words=f"dimension {dimension} carries a massive activation: {value:,.0f} before {state.name} at position "
            f"{position}, {value / max(state.median, 1e-30):,.0f}× that state's median",
        )
        for dimension, (value, state, position) in found.items()
    ]
