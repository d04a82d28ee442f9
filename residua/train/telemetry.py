"""Measures figures of every layer while a run trains: peaks, sinks, depth weights, gates, mixtures and gains.

Every `train.telemetry_every` steps (by default about twenty times in a run), the same few tokens of the validation text
go through the uncompiled model, outside the step. This captures no graph, draws no random numbers and reads no training
text. Figures are 0-dim tensors on the device until all are computed; then the host reads them once.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residua.config.run import RunConfig, TrainConfig
from residua.data.loader import Batch
from residua.machine import short_bytes
from residua.model import gauges, taps
from residua.ops._runtime.numeric import wide
from residua.reading import counted
from residua.train.low_precision import FIGURES as PRODUCT_FIGURES
from residua.train.step import Step
from residua.train.telemetry_curves import KIND, over_places, product_name, sublayer_name, telemetry_of

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

MEASURED_SHARE = 0.01
"""Share of the tokens trained between two measurements that is measured; a forward pass is a third of a step's work."""
MIN_TOKENS = 64
MEASUREMENTS, MAX_LOG_LINES = 20, 10
"""Default number of measurements in a run, and maximum number of log lines between two of them."""
REPORTED_GROWTH, GROWTH_WINDOW = 10.0, 0.1
"""A peak is reported if it grows by this factor within this share of the run."""
DIGITS = 5
QUARTILES = ("beta_q1", "beta_median", "beta_q3", "beta_max")

Table = dict[str, list[float | None]]
"""A figure's name → its value at place 0, 1, …; None where a place has no value or a non-finite one."""


class Gauges(dict[str, Tensor]):
    """Receives the taps of one forward pass and computes figures from them, by name and place.

    Small tensors (sizes of dimensions, gates, depth weights) are stored and reduced for all places at once, because on
    a GPU the cost is the host's time to launch kernels.
    """

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model
        self._figures: dict[tuple[str, int], Tensor] = {}
        self._sizes: dict[int, Tensor] = {}
        self._weights: dict[int, Tensor] = {}
        self._betas: dict[int, Tensor] = {}
        self._gammas: dict[int, Tensor] = {}

    def __setitem__(self, name: str, value: Tensor) -> None:
        part, number, what = taps.parts(name) or ("sublayer", len(self.model.order), "input")  # final.input
        match part, what:
            case "sublayer", "input":
                self._figures["peak", number], self._sizes[number] = gauges.peak_and_sizes(value)
            case "depth", "weights":
                self._weights[number + 1] = value
            case "depth", "pre":
                self._weights[number] = value
            case "depth", "streams":
                for i, peak in enumerate(value.abs().amax((0, 1, 3)).unbind()):
                    self._figures[f"stream.{i}", number + 1] = peak
            case "depth", "beta":
                self._take_beta(number, value)
            case "attention", "gate":
                self._figures["gate_mean", number] = value.double().mean()
                self._figures["gate_closed", number] = gauges.closed(value).double().mean()
            case "product", _:
                for figure, measured in zip(PRODUCT_FIGURES, value.unbind(), strict=True):
                    self._figures[f"{figure}.{what}", number] = measured
            case "attention", "gamma" | "value_gate":
                self._gammas[number] = value

    def figures(self) -> dict[tuple[str, int], float]:
        """All figures; waits for the device."""
        self._dimensions()
        for readers, weights in _alike(self._weights):
            self._note("entropy", readers, gauges.depth_entropy(weights).reshape(len(readers), -1).mean(-1))
        self._gates()
        self._anchors()
        by_dtype: dict[torch.dtype, list[tuple[str, int]]] = defaultdict(list)
        for key, value in self._figures.items():
            by_dtype[value.dtype].append(key)
        keys = [key for group in by_dtype.values() for key in group]
        parts = [torch.stack([self._figures[key] for key in group]).double() for group in by_dtype.values()]
        return dict(zip(keys, torch.cat(parts).tolist(), strict=True))

    def table(self) -> Table:
        """All figures, rounded."""
        places: dict[str, dict[int, float]] = defaultdict(dict)
        for (name, place), value in self.figures().items():
            places[name][place] = value
        return {name: [_rounded(at.get(i)) for i in range(max(at) + 1)] for name, at in places.items()}

    def _take_beta(self, k: int, beta: Tensor) -> None:
        self._betas[k] = beta
        recovery = self.model.topology.recovery()
        amplification = None if recovery is None else recovery.amplification(k, beta)
        if amplification is not None:
            self._figures["recovery", k] = amplification

    def _note(self, name: str, places: Iterable[int], values: Tensor) -> None:
        for place, value in zip(places, values.unbind(), strict=True):
            self._figures[name, place] = value

    def _dimensions(self) -> None:
        """Residual-sink ratios, and each norm's gain on its largest dimension."""
        sizes = torch.stack([self._sizes[reader] for reader in self._sizes])
        self._note("sink_ratio", self._sizes, gauges.relative_sizes(sizes).amax(-1))
        norms = [*(sublayer.norm for sublayer in self.model.executions), self.model.norm]
        gains = {k: gain for k, norm in enumerate(norms) if (gain := norm.gain()) is not None}
        if gains:
            size = torch.stack(list(gains.values())).abs()
            largest = sizes[list(gains)].argmax(-1, keepdim=True)
            self._note("gain", gains, size.mean(-1))
            self._note("sink_gain", gains, size.gather(-1, largest)[:, 0])

    def _gates(self) -> None:
        for sublayers, betas in _alike(self._betas):
            flat = wide(betas).flatten(1)
            self._note("beta_mean", sublayers, flat.mean(-1))
            for name, values in zip(QUARTILES, gauges.quantiles(flat, (0.25, 0.5, 0.75, 1.0)), strict=True):
                self._note(name, sublayers, values)

    def _anchors(self) -> None:
        """Scales of anchors and current projections: λ is a parameter; γ, if there is one, was tapped."""
        for k, sublayer in enumerate(self.model.executions):
            mix = sublayer.body.anchor_mix()
            scales = {} if mix is None else mix.scales(self._gammas.get(k // 2))
            for pathway, (anchor, current) in scales.items():
                self._figures[f"anchor.{pathway}", k // 2] = anchor.mean()
                self._figures[f"current.{pathway}", k // 2] = current.mean()


def _alike(tensors: dict[int, Tensor]) -> Iterator[tuple[list[int], Tensor]]:
    """Group tensors by shape: the places of each group, and its tensors stacked."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for place, tensor in tensors.items():
        by_shape[tensor.shape].append(place)
    for places in by_shape.values():
        yield places, torch.stack([tensors[place] for place in places])


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


class Growth:
    """Detects a peak that grew tenfold within a tenth of the run.

    Peaks in the first tenth, or in a longer warm-up, are ignored, because those of an untrained model are small.
    """

    def __init__(self, config: RunConfig) -> None:
        steps = config.train.steps
        self._window = steps * GROWTH_WINDOW
        self._sublayers = config.model.sublayers
        self._first = max(config.train.schedule.warmup, self._window)
        self._history: list[tuple[int, dict[tuple[str, int], float]]] = []

    def check(self, step: int, table: Table) -> str | None:
        """A sentence about the peak that grew most, or None; after a sentence, comparisons restart from this step."""
        if step < self._first:
            return None
        peaks = {
            (name, place): value
            for name, values in table.items()
            if name.partition(".")[0] in ("peak", "stream", "kurtosis")
            for place, value in enumerate(values)
            if value is not None
        }
        self._history = [(then, old) for then, old in self._history if then >= step - self._window]
        grown = [
            (peaks[key] / low, key, then, low)
            for then, old in self._history
            for key, low in old.items()
            if key in peaks and peaks[key] >= REPORTED_GROWTH * low > 0
        ]
        self._history = [*([] if grown else self._history), (step, peaks)]
        if not grown:
            return None
        factor, key, then, low = max(grown)
        others = len({other for _, other, _, _ in grown}) - 1
        more = f", and {counted(others, 'other peak')} at least tenfold" if others else ""
        return (
            f"step {step}: the largest {self._name(*key)} grew {factor:.3g}-fold in {counted(step - then, 'step')}, "
            f"from {low:.4g} to {peaks[key]:.4g}{more}: often the first sign of a divergence, so watch the loss "
            "and lower train.optimizer.lr if the loss grows too."
        )

    def _name(self, name: str, reader: int) -> str:
        family, _, part = name.partition(".")
        where = "the final norm" if reader == self._sublayers else sublayer_name(reader)
        if family == "kurtosis":
            return f"kurtosis of the input of {product_name(reader, part)}"
        return f"{f'value of stream {part}' if part else '|h|'} before {where}"


def _out_of_range(step: Step, done: int) -> list[str]:
    """A list with a sentence about the tensor that most exceeded its FP8 range in the last step, if any did.

    Nothing in the first `history` steps: all of them count already, so a longer history would not help.
    """
    low = step.low_precision
    beyond = [] if low is None or done <= low.config.history else low.beyond()
    if not beyond:
        return []
    most = max(beyond, key=lambda each: each.factor)
    (k, name), others = most.place, len(beyond) - 1
    more = f", and {counted(others, 'other tensor')} exceeded theirs" if others else ""
    return [
        f"step {done}: the {most.tensor} of {product_name(k, name)} was {most.factor:.3g} times its FP8 "
        f"range and was clamped{more}: raise train.low_precision.history for wider ranges."
    ]


class Telemetry:
    """Measures a run's model, and reports what a user should know."""

    def __init__(self, config: RunConfig, validation: Batch) -> None:
        recipe = config.train
        self.config = config
        self.every = interval(recipe)
        self.batch = first_tokens(validation, measured_tokens(config))
        self.growth = Growth(config)

    def due(self, done: int) -> bool:
        """Whether to measure after step `done`: the first, every N-th, the last."""
        return done in (1, self.config.train.steps) or done % self.every == 0

    def recall(self, records: Iterable[dict[str, Any]]) -> None:
        """Restore the history from the records of the run's earlier sessions."""
        for record in telemetry_of(records):
            self.growth.check(record["step"], record["figures"])

    def measure(self, step: Step, done: int) -> dict[str, Any]:
        """The record of step `done`: figures, junctions that store their streams from now on, sentences to print."""
        start = time.perf_counter()
        gauges = Gauges(step.model)
        step.observe(self.batch, gauges)
        table = gauges.table()
        overall = {name: over_places({"figures": table}, name) for name in ("peak", "sink_ratio")}
        growth = self.growth.check(done, table)
        messages = [] if growth is None else [growth]
        messages += _out_of_range(step, done)
        kept, new = self._kept(step, table)
        if new:
            messages.append(self._switched(step, done, new))
        return {
            "kind": KIND,
            "step": done,
            "tokens": done * self.config.tokens_per_step,
            "took": round(time.perf_counter() - start, 6),
            **overall,
            "figures": table,
            **({"kept": kept} if kept else {}),
            **({"said": messages} if messages else {}),
        }

    def _kept(self, step: Step, table: Table) -> tuple[list[int], Sequence[int]]:
        """The junctions that store their streams, and those of them that start to do so now."""
        recovery, epsilon = step.model.topology.recovery(), torch.finfo(step.precision).eps / 2
        if recovery is None:
            return [], []
        measured = {k: value for k, value in enumerate(table.get("recovery", ())) if value is not None}
        new = recovery.needs_keeping(measured, epsilon)
        return sorted({*recovery.kept, *new}), new

    def _switched(self, step: Step, done: int, new: Sequence[int]) -> str:
        recipe, model, recovery = self.config.train, step.model, step.model.topology.recovery()
        assert recovery is not None
        each = recipe.micro_batch * self.config.sequence * recovery.streams * model.config.width
        size = len(new) * each * torch.finfo(step.precision).bits // 8
        which = f"sublayer {new[0]}" if len(new) == 1 else f"sublayers {', '.join(map(str, new))}"
        return (
            f"step {done}: the gates after {which} overwrite too much for inversion, so the streams there are "
            f"stored from now on ({short_bytes(size)} more memory)."
        )


def build_telemetry(config: RunConfig, validation: Batch, model: Decoder | None) -> Telemetry | None:
    """The telemetry of a run; None if it is off, or if no process has the whole model."""
    return None if config.train.telemetry == "off" or model is None else Telemetry(config, validation)


def interval(recipe: TrainConfig) -> int:
    """Steps between two measurements: as configured, or whole log lines for about twenty or more in a run."""
    lines = math.ceil(recipe.steps / (MEASUREMENTS * recipe.log_every))
    return recipe.telemetry_every or recipe.log_every * min(lines, MAX_LOG_LINES)


def measured_tokens(config: RunConfig) -> int:
    """Tokens per measurement: 1% of those trained in between, at least 64, at most `train.telemetry_tokens`."""
    recipe = config.train
    between = interval(recipe) * config.tokens_per_step
    return min(recipe.telemetry_tokens, max(MIN_TOKENS, int(MEASURED_SHARE * between)))


def first_tokens(batch: Batch, tokens: int) -> Batch:
    """The first `tokens` of a batch, as whole rows or as the beginning of one row."""
    length = min(batch.tokens.shape[1], tokens)
    rows = tokens // length
    segments = None if batch.segments is None else batch.segments[:rows, :length]
    return Batch(batch.tokens[:rows, :length], batch.targets[:rows, :length], segments)
