"""How alike states are: cosine and angular distance between what every two sublayers read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from residua.config.settings import Frozen
from residua.diagnose.metric import Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import LABELS, add_tabs, by_layer, layers_later
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Page
from residua.report.figures import heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TOKENS_AT_ONCE = 256


class SimilarityKeys(Frozen):
    """Mean over tokens of cos(x_l, x_m) and of arccos(cos(x_l, x_m))/π for every two states, [S, S]."""

    similarity: list[list[float]]
    angular_distance: list[list[float]]


class Similarity(Metric):
    """State × state, token by token."""

    keys = SimilarityKeys
    file_place, page_place = 30, 60

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.cosine: Tensor | float = 0.0
        self.angle: Tensor | float = 0.0
        self.tokens = 0

    def add(self, seen: Observation) -> None:
        rows = [seen.states[k].flatten(0, 1) for k in sorted(seen.states)]
        count = rows[0].shape[0]
        for start in range(0, count, TOKENS_AT_ONCE):
            x = torch.stack([wide(row[start : start + TOKENS_AT_ONCE]) for row in rows], 1)
            u = x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            cosine = (u @ u.transpose(1, 2)).double().clamp(-1, 1)
            # a state's angle to itself is zero, which arccos of a rounded 1 would miss
            cosine.diagonal(dim1=1, dim2=2).fill_(1.0)
            self.cosine = self.cosine + cosine.sum(0)
            self.angle = self.angle + (cosine.arccos() / torch.pi).sum(0)
        self.tokens += count

    def facts(self) -> SimilarityKeys:
        assert isinstance(self.cosine, Tensor) and isinstance(self.angle, Tensor)
        return SimilarityKeys(
            similarity=(self.cosine.cpu() / self.tokens).tolist(),
            angular_distance=(self.angle.cpu() / self.tokens).tolist(),
        )

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
    def draw(cls, page: Page, models: Models) -> None:
        section = page.section(
            "Token and layer similarity",
            "Healthy: tokens stay different (similarity well below 1), the embedding is slowly left behind, and many "
            "dimensions are used.",
        )
        views = {
            "token similarity": _state_curve(models, "token_similarity", "mean cosine of two tokens"),
            "similarity to the input": _state_curve(models, "input_similarity", "cosine with the first state"),
            "core features": _state_curve(models, "core_features", "components for 99 % of the variance"),
        }
        add_tabs(section, views)
        section.subheading("State by state")
        section.tabs(
            _pairs(models, "similarity", "cosine", 1.0),
            "Cosine between what two sublayers read, token by token. Healthy: fades away from the diagonal; a solid "
            "block is a run of layers that hardly change anything.",
        )
        section.tabs(
            _pairs(models, "angular_distance", "angle / π", 0.5),
            "Angular distance arccos(cos)/π. Healthy: grows steadily away from the diagonal.",
        )
        later = {m.name: figure for m in models if (figure := layers_later(m, _distance(m))) is not None}
        add_tabs(
            section,
            later,
            "The same between what is read after layer ℓ and n layers later, as Gromov et al. draw it. Healthy: a map "
            "that does not fade to the right; deep layers near zero hardly change anything.",
        )
        mixed = [m.name for m in models if m.state_name != "residual stream"]
        if mixed:
            section.note(
                f"{', '.join(mixed)}: there is no single residual stream; a state is what a sublayer reads, mixed anew "
                "each time."
            )


def _distance(model: Model) -> Callable[[int, int], float | None]:
    """The angular distance between what two readers read."""
    place = {s.index: index for index, s in enumerate(model.states)}

    def between(one: int, other: int) -> float | None:
        known = one in place and other in place
        return float(model.angular_distance[place[one]][place[other]]) if known else None

    return between


def _state_curve(models: Models, key: str, title: str) -> Figure | None:
    return by_layer(
        models,
        lambda m: [(s.index, getattr(s, key)) for s in m.states if getattr(s, key) is not None],
        title,
        x="read by",
    )


def _pairs(models: Models, key: str, title: str, high: float) -> dict[str, Figure]:
    """State × state, coloured from zero unless something is below."""
    found = {}
    for m in models:
        values, names = getattr(m, key), [s.name for s in m.states]
        low = -high if min(map(min, values)) < 0 else 0.0
        step = -(-len(names) // (2 * LABELS))
        found[m.name] = heatmap(
            values, names, names, "read by", "read by", title, bounds=(low, high), height=560, step=step
        )
    return found
