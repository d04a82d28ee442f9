"""States, the inputs of sublayers: their size, massive activations, dimensionality and similarity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Activation, Explained, Finding, Largest, LayerTrack, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import (
    LABELS,
    NONE,
    Part,
    Table,
    Topic,
    by_layer,
    label_step,
    layers_later,
    on_log,
    over,
    owners,
    tab_each,
)
from residua.diagnose.sentences import listed, short, sureness, token
from residua.diagnose.text import Sample
from residua.errors import UserError
from residua.model.gauges import cosines
from residua.ops._runtime.numeric import wide
from residua.report import Bar, Cell, Column
from residua.report.figures import Figure, heatmap

CORE_VARIANCE = 0.99
COVARIANCE_BYTES = 512 << 20
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""Sun et al. (arXiv 2402.17762): |h| above 100 and about a thousand times the median."""
MOST = 1e6
"""The picture's scale ends here, however small the median is."""


class StateFacts(Frozen):
    """The input of one sublayer (the last entry: the final norm's)."""

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


def token_similarity(h: Tensor) -> Tensor:
    """Mean cosine over pairs of different tokens of each sequence, [B]; 1 for a sequence of one token.

    With u = h/‖h‖ it is (‖Σ u_i‖² − Σ ‖u_i‖²)/(T(T−1)).
    """
    u: Tensor = (h / h.norm(dim=-1, keepdim=True).clamp(min=1e-30)).double()
    length = h.shape[1]
    if length == 1:
        return torch.ones(h.shape[0], dtype=torch.float64, device=h.device)
    return (u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (length * (length - 1))


class CoreFeatures:
    """PCA: the smallest k for which the k largest eigenvalues of the covariance hold 99 % of its trace.

    Second moments are computed about the first batch's mean, so that a large constant dimension costs no precision.
    """

    def __init__(self) -> None:
        self.count = 0
        self.centre: Tensor | None = None
        self.sum = self.square = torch.zeros(())

    def add(self, state: Tensor) -> None:
        x = wide(state).flatten(0, 1)
        if self.centre is None:
            self.centre = x.mean(0)
        x = x - self.centre
        self.sum = self.sum + x.double().sum(0)
        self.square = self.square + (x.T @ x).double()
        self.count += len(x)

    def result(self) -> int:
        mean = self.sum / self.count
        covariance = self.square / self.count - mean[:, None] * mean[None]
        if not torch.isfinite(covariance).all():
            raise UserError("hidden states overflow although every weight is finite: some weights are too large.")
        values = torch.linalg.eigvalsh(covariance).clamp(min=0).flip(0)
        share = values.cumsum(0) / values.sum().clamp(min=1e-300)
        return int((share < CORE_VARIANCE - 1e-12).sum()) + 1


class States(Metric):
    """Every state of a model [B, T, C]. States are numbered 0 … sites; the last is the final norm's input.

    rms: sqrt(mean h²). median: mean over tokens of the (lower) median of |h|. Input similarity: the cosine between the
    whole sequence [T·C] and that of the first state.
    """

    keys = StateKeys
    kinds = ("massive_activation",)
    defect = "massive activation"
    columns = (
        Column("largest |h|", "over all tokens and sublayers"),
        Column("token similarity", "mean cosine of two tokens of a sequence, mean over states"),
        Column("core features", "principal components that hold 99 % of the variance, mean over states"),
    )
    file_place, page_place = 20, 40

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        count = len(subject.sites) + 1
        self.largest: dict[int, Largest] = defaultdict(Largest)
        self.core = {k: CoreFeatures() for k in _affordable(count, subject.width)}

    def add(self, observation: Observation) -> None:
        tokens, first = observation.tokens, wide(observation.states[min(observation.states)]).flatten(1)
        for k, state in observation.states.items():
            h = wide(state)
            self.largest[k].add(h.abs(), tokens)
            self.means["square", k].add(observation.mean_square(k).sum(), tokens.numel())
            self.means["median", k].add(observation.median(k).double().sum(), tokens.numel())
            self.means["tokens", k].add(token_similarity(h).sum(), len(tokens))
            self.means["input", k].add(torch.cosine_similarity(h.flatten(1), first, -1).double().sum(), len(tokens))
            if k in self.core:
                self.core[k].add(state)

    def facts(self) -> StateKeys:
        return StateKeys(states=[self._state(k) for k in sorted(self.largest)])

    def _state(self, k: int) -> StateFacts:
        core = self.core.get(k)
        return StateFacts(
            index=k,
            name=self.subject.reader_name(k),
            rms=float(self.means["square", k].value()) ** 0.5,
            median=float(self.means["median", k].value()),
            largest=self.largest[k].facts(self.sample),
            token_similarity=float(self.means["tokens", k].value()),
            input_similarity=float(self.means["input", k].value()),
            core_features=None if core is None else core.result(),
        )

    def findings(self, model: Model) -> list[Finding]:
        """Report one finding per dimension with massive activations."""
        return [
            Finding(
                kind="massive_activation",
                where={"dimension": a.dimension},
                words=f"dimension {a.dimension} carries a massive activation: {a.value:,.0f} before {state.name} at "
                f"position {a.position} (token {token(a.text, a.token)}), {a.value / max(state.median, 1e-30):,.0f}× "
                "that state's median",
            )
            for state, a in _massive(model.states)
        ]

    @classmethod
    def explain(cls, model: Model, findings: Sequence[Finding]) -> Explained:
        massive = {a.dimension: (state, a) for state, a in _massive(model.states)}
        places = [massive[d] for f in findings if isinstance(d := f.where["dimension"], int) and d in massive]
        if not places:
            return super().explain(model, findings)
        state, a = max(places, key=lambda place: place[1].value)
        sites = [s.name for s, other in _massive(model.states, every=True) if other.dimension == a.dimension]
        ratio = a.value / max(state.median, 1e-30)
        return Explained(
            f"{listed('dimension', [a.dimension for _, a in places])}; largest before {state.name}, token "
            f"{token(a.text, a.token)} at position {a.position}; massive in {len(set(sites))} of "
            f"{len(model.states)} states",
            sureness(
                f"{short(ratio)}× the median, where {MASSIVE_RATIO:,.0f}× counts",
                min(ratio / MASSIVE_RATIO, a.value / MASSIVE),
                model,
            ),
            "Expect a higher cost in low precision; residua quantize measures it. To avoid it, train with a gate "
            "(model.attention.gate=elementwise) or a gated norm (model.norm.kind=gatednorm).",
        )

    @classmethod
    def tracks(cls, models: Models) -> Iterable[LayerTrack]:
        high = min(max([MASSIVE_RATIO, *(_ratio(s) for m in models for s in m.states)]), MOST)
        yield LayerTrack(
            "largest |h|",
            f"log, 1 to {short(high)}×",
            f"The largest |h| that the layer reads, divided by the median |h|. The line is {MASSIVE_RATIO:,.0f}×: an "
            f"activation beyond it is massive if it is also above {MASSIVE:g}.",
            [_peaks(model, high) for model in models],
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        known = [s for s in model.states if s.core_features is not None]
        if known:
            least = min(known, key=lambda s: s.core_features or 0)
            yield Sentence(
                70,
                f"99 % of the variance needs {least.core_features} of {model.width} dimensions at the minimum, "
                f"before {least.name}; tokens of a sequence are {model.states[-1].token_similarity:.2f} alike at the "
                "end (mean cosine).",
            )

    @classmethod
    def cells(cls, model: Model) -> Sequence[str]:
        known = [s.core_features for s in model.states if s.core_features is not None]
        return [
            f"{max(s.largest[0].value for s in model.states):.4g}",
            f"{sum(s.token_similarity for s in model.states) / len(model.states):.4f}",
            f"{sum(known) / len(known):.1f}" if known else NONE,
        ]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        largest = by_layer(
            models,
            lambda m: [(s.index, s.largest[0].value) for s in m.states],
            "largest |h|",
            floor=lambda m: [(s.index, max(s.median, 1e-12)) for s in m.states],
            floor_name="median |h|",
            log=True,
            x="read by",
        )
        rows: list[list[Cell]] = []
        for m, owner in zip(models, owners(models), strict=True):
            state = max(m.states, key=lambda s: s.largest[0].value)
            for a in state.largest:
                places = [f"{a.value:.4g}", str(a.dimension), str(a.sequence), str(a.position)]
                rows.append([owner, state.name, *places, token(a.text, a.token)])
        columns = [Column(title) for title in ("|h|", "dimension", "sequence", "position")]
        yield Topic(
            "Massive activations",
            "The largest single |h| before each sublayer, with the median for comparison. Healthy: within two "
            "orders of magnitude; a thousand times the median at one or two tokens is a massive activation.",
            Part(largest),
            Part(Table([Column("read by", numeric=False), *columns, Column("token", numeric=False)], rows)),
        )


def _affordable(states: int, width: int) -> list[int]:
    """Choose evenly spaced states whose covariance matrices fit the budget; the first and last are always included."""
    count = max(2, min(states, COVARIANCE_BYTES // (8 * width * width)))
    return sorted({round(i * (states - 1) / (count - 1)) for i in range(count)})


def _massive(states: Sequence[StateFacts], *, every: bool = False) -> list[tuple[StateFacts, Activation]]:
    """Single values above 100 and above a thousand medians: the largest of each dimension, or, with `every`, all."""
    places = [
        (state, a)
        for state in states
        for a in state.largest
        if a.value > MASSIVE and a.value > MASSIVE_RATIO * state.median
    ]
    if every:
        return places
    largest: dict[int, tuple[StateFacts, Activation]] = {}
    for state, a in places:
        if a.dimension not in largest or a.value > largest[a.dimension][1].value:
            largest[a.dimension] = (state, a)
    return list(largest.values())


def _ratio(state: StateFacts) -> float:
    return state.largest[0].value / max(state.median, 1e-30)


def _peaks(model: Model, high: float) -> dict[int, Bar]:
    """By layer, the largest and median |h| of its inputs; the final norm's are under `model.layers`."""
    massive = [state.index for state, _ in _massive(model.states, every=True)]
    layers = {s.index: model.sites[s.index].layer if s.index < len(model.sites) else model.layers for s in model.states}
    bars = {}
    for layer in dict.fromkeys(layers.values()):
        states = [s for s in model.states if layers[s.index] == layer]
        largest = max(states, key=_ratio)
        a, bad = largest.largest[0], any(s.index in massive for s in states)
        bars[layer] = Bar(
            (on_log(_ratio(largest), 1.0, high),),
            f"{short(_ratio(largest))}×",
            mark=on_log(MASSIVE_RATIO, 1.0, high),
            flag="bad" if bad else "",
            words=f"{'massive activation: ' if bad else ''}{a.value:.4g} in dimension {a.dimension}, token "
            f"{token(a.text, a.token)} at position {a.position}, before {largest.name}",
        )
    return bars


class SimilarityKeys(Frozen):
    """Mean over tokens of cos(x_l, x_m) and of arccos(cos(x_l, x_m))/π for every pair of states, [S, S]."""

    similarity: list[list[float]]
    angular_distance: list[list[float]]


class Similarity(Metric):
    """Similarity of states, state × state, token by token."""

    keys = SimilarityKeys
    file_place, page_place = 30, 60

    def add(self, observation: Observation) -> None:
        rows = [observation.states[k].flatten(0, 1) for k in sorted(observation.states)]
        for cosine in cosines(rows):
            # a state's angle to itself is zero; arccos of a rounded 1 would not be
            cosine.diagonal(dim1=1, dim2=2).fill_(1.0)
            self.means["cosine"].add(cosine.sum(0), len(cosine))
            self.means["angle"].add((cosine.arccos() / torch.pi).sum(0), len(cosine))

    def facts(self) -> SimilarityKeys:
        cosine, angle = self.means["cosine"].value(), self.means["angle"].value()
        return SimilarityKeys(similarity=cosine.tolist(), angular_distance=angle.tolist())

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        steps = {k: model.angular_distance[k][k + 1] for k in range(len(model.states) - 1)}
        if steps:
            most = max(steps, key=lambda k: steps[k])
            yield Sentence(
                90,
                f"The {model.state_name} turns most between {model.states[most].name} and "
                f"{model.states[most + 1].name}: {steps[most]:.2f} of a half turn.",
            )

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        def curve(value: str, title: str) -> Figure | None:
            return by_layer(models, over("states", value, "index"), title, x="read by")

        mixed = [m.name for m in models if m.state_name != "residual stream"]
        yield Topic(
            "Token and layer similarity",
            "Healthy: tokens stay different (similarity well below 1), states move slowly away from the "
            "embedding, and many dimensions are used.",
            Part(
                {
                    "token similarity": curve("token_similarity", "mean cosine of two tokens"),
                    "similarity to the input": curve("input_similarity", "cosine with the first state"),
                    "core features": curve("core_features", "components for 99 % of the variance"),
                }
            ),
            Part(
                tab_each(models, lambda m: _pairs(m, m.similarity, "cosine", 1.0)),
                "Cosine between the inputs of two sublayers, token by token. Healthy: fades away from the "
                "diagonal; a solid block is a range of layers that hardly change anything.",
                "State by state",
            ),
            Part(
                tab_each(models, lambda m: _pairs(m, m.angular_distance, "angle / π", 0.5)),
                "Angular distance arccos(cos)/π. Healthy: grows steadily away from the diagonal.",
            ),
            Part(
                tab_each(models, lambda m: layers_later(m, _distance(m))),
                "The same between the states after layer ℓ and n layers later, as in Gromov et al. Healthy: a "
                "map that does not fade to the right; deep layers near zero hardly change anything.",
            ),
            Part(
                f"{', '.join(mixed)}: there is no single residual stream; a state is the input of a sublayer, "
                "mixed differently each time."
                if mixed
                else None
            ),
        )


def _distance(model: Model) -> Callable[[int, int], float | None]:
    """The angular distance between the inputs of two readers."""
    place = {s.index: index for index, s in enumerate(model.states)}

    def between(one: int, other: int) -> float | None:
        known = one in place and other in place
        return float(model.angular_distance[place[one]][place[other]]) if known else None

    return between


def _pairs(model: Model, values: Sequence[Sequence[float]], title: str, high: float) -> Figure:
    """Draw state × state; colours start at zero unless some value is negative."""
    names = [s.name for s in model.states]
    low, step = -high if min(map(min, values)) < 0 else 0.0, label_step(len(names), 2 * LABELS)
    return heatmap(values, names, names, "read by", "read by", title, bounds=(low, high), height=560, step=step)
