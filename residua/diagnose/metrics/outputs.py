"""The largest single values that sublayers write: the three largest |y| of every output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from pydantic import Field

from residua.config.settings import Frozen
from residua.diagnose.metric import LARGEST, Activation, Largest, Metric, Model, Models, Sentence
from residua.diagnose.observe import Observation, Subject
from residua.diagnose.plots import NONE, Part, Points, Topic, after_layers, places
from residua.diagnose.sentences import token
from residua.diagnose.text import Sample
from residua.ops._runtime.numeric import wide
from residua.report import Column, theme
from residua.report.figures import Curve, Figure, curves

DASHES = ("solid", "dash", "dot")


class OutputFacts(Frozen):
    """The three largest |y| of one sublayer's output."""

    site: int
    largest: list[Activation]


class OutputKeys(Frozen):
    """Every sublayer's output."""

    outputs: list[OutputFacts] = Field(default_factory=list)


class Outputs(Metric):
    """The largest |y| over all tokens, as `States` measures |h| of sublayer inputs."""

    keys = OutputKeys
    columns = (Column("largest |y|", "of all sublayers' outputs"),)
    file_place, page_place = 25, 45

    def __init__(self, subject: Subject, sample: Sample) -> None:
        super().__init__(subject, sample)
        self.largest: dict[int, Largest] = defaultdict(Largest)

    def add(self, observation: Observation) -> None:
        for k, output in observation.outputs.items():
            self.largest[k].add(wide(output).abs(), observation.tokens)

    def facts(self) -> OutputKeys:
        return OutputKeys(
            outputs=[
                OutputFacts(site=k, largest=largest.facts(self.sample)) for k, largest in sorted(self.largest.items())
            ]
        )

    @classmethod
    def sentences(cls, model: Model) -> Iterable[Sentence]:
        if model.outputs:
            most = max(model.outputs, key=lambda o: o.largest[0].value)
            a = most.largest[0]
            yield Sentence(
                85,
                f"The largest single output is {a.value:.4g}, from {model.sites[most.site].name} in dimension "
                f"{a.dimension} at token {token(a.text, a.token)}.",
            )

    @classmethod
    def cells(cls, model: Model) -> list[str]:
        return [f"{max(o.largest[0].value for o in model.outputs):.4g}" if model.outputs else NONE]

    @classmethod
    def topics(cls, models: Models) -> Iterable[Topic]:
        if not any(m.outputs for m in models):
            return
        views = {}
        for part in ("feed-forward", "attention"):
            views[f"{part} outputs"] = _figure(models, "|y|", part, _written)
            views[f"state after {part}"] = _figure(models, "|h|", part, _read)
        yield Topic(
            "Largest outputs",
            "The three largest |y| that each layer's attention and feed-forward write, and the three largest |h| of "
            "the state after them. Healthy: three flat lines close together. A first line far above the "
            "second is a single value that a sublayer writes on purpose; a plateau is one that persists.",
            Part(views, "Solid, dashed and dotted: the largest, second and third."),
        )


def _written(model: Model) -> dict[int, list[Activation]]:
    """By reader, the largest |y| of the sublayer before it."""
    return {o.site + 1: o.largest for o in model.outputs}


def _read(model: Model) -> dict[int, list[Activation]]:
    """By reader, the largest |h| of its input."""
    return {s.index: s.largest for s in model.states}


def _figure(models: Models, y: str, part: str, of: Callable[[Model], dict[int, list[Activation]]]) -> Figure | None:
    """The largest values over layers, after their attention or feed-forward: a colour per model, a dash per rank."""

    def points(model: Model, rank: int) -> Points:
        largest, readers = of(model), after_layers(model).get(part, {})
        return [(float(n), largest[r][rank].value) for n, r in readers.items() if rank < len(largest.get(r, []))]

    series = [
        Curve(
            model.name, [x for x, _ in line], [value for _, value in line], theme.colour(place), group=model.name,
            legend=rank == 0, dash=DASHES[rank], markers=rank == 0, symbol=theme.symbol(place),
            opacity=1.0 if rank == 0 else 0.7,
        )
        for model, place in zip(models, places(models), strict=True)
        for rank in range(LARGEST)
        if (line := points(model, rank))
    ]  # fmt: skip
    if not series:
        return None
    return curves(series, "layer", f"three largest {y}", log_y=True, whole_x=True, height=340)
