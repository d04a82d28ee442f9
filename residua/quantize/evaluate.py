"""Measure the cost of low precision: calibration and evaluation text, a model's loss, the error of each module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from residua.config.model import ModelConfig
from residua.config.run import RunConfig
from residua.data import Dataset, Loader, validation_batches
from residua.data.loader import IGNORED, Batch
from residua.data.source import open_data
from residua.errors import UserError
from residua.model import gauges, taps
from residua.model.decoder import Decoder
from residua.model.moe import Experts, expert_states
from residua.model.taps import hooked
from residua.ops._runtime.numeric import no_autocast
from residua.ops.low_precision.nvfp4 import static_scale
from residua.quantize.modules import (
    in_low_precision,
    inputs,
    install,
    is_rounded,
    matrices,
    quantize_weights,
    rounded,
    targets,
    unquantized,
)
from residua.quantize.result import ERROR_TOKENS, ModuleError, Outlier, Probe
from residua.quantize.schemes import Quantized, Scheme
from residua.quantize.smoothing import edges, smooth
from residua.report.terminal import StageProgress
from residua.storage.checkpoint import model_tensors
from residua.storage.model_folder import open_text

SEQUENCES_AT_ONCE = 16
CALIBRATION_SEQUENCES = 4096


@dataclass(frozen=True)
class CalibrationText:
    """Prepared text as a run sees it: shuffled training windows, and the fixed validation set."""

    dataset: Dataset
    config: RunConfig

    @classmethod
    def of_run(cls, config: RunConfig) -> CalibrationText:
        """The text that a run was trained and validated on."""
        return cls(open_data(config), config)

    @classmethod
    def of_folder(cls, folder: Path, model: ModelConfig, data: Path | None) -> CalibrationText:
        """The text of the model in a folder, or the prepared dataset `data`, in the model's tokens."""
        return cls(*open_text(folder, model, data))

    @property
    def _segments(self) -> bool:
        return self.config.data.masking == "documents"

    def validation(self, tokens: int | None = None) -> list[Batch]:
        """The run's validation set, or the first `tokens` of it."""
        whole = self.config.data.validation_tokens
        shape = self.dataset.split("validation"), self.config.sequence, SEQUENCES_AT_ONCE
        limit = min(tokens or whole, whole)
        return list(validation_batches(*shape, limit_tokens=limit, segments=self._segments))

    def calibration(self, sequences: int) -> Iterator[Batch]:
        """Yield the first `sequences` training windows, which are always the same."""
        size, split = min(SEQUENCES_AT_ONCE, sequences), self.dataset.split("train")
        loader = Loader(split, self.config.sequence, size, segments=self._segments, prefetch=0)
        for start, batch in zip(range(0, sequences, size), loader, strict=False):
            yield _first(batch, sequences - start)


def _first(batch: Batch, rows: int) -> Batch:
    segments = None if batch.segments is None else batch.segments[:rows]
    return Batch(batch.tokens[:rows], batch.targets[:rows], segments)


OUTLIERS_SHOWN = 3


def high_precision(device: torch.device) -> AbstractContextManager[Any]:
    """The precision of an unquantized model: bf16 autocast on a GPU, as in training, and fp32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


@torch.no_grad()
def mean_loss(model: Decoder, batches: Iterable[Batch], tell: Callable[[], None] = lambda: None) -> float:
    """Cross-entropy in nats over all targets of the batches; `tell` is called after each."""
    device = next(model.parameters()).device
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in batches:
        there = batch.to(device)
        count = int((batch.targets != IGNORED).sum())
        with high_precision(device):
            total += model.losses(there.tokens, there.targets, segments=there.segments)[0].double() * count
        targets += count
        tell()
    return float(total) / targets


@torch.no_grad()
def forward(model: Decoder, batch: Batch) -> Tensor:
    """The final states of a batch, computed on the model's device."""
    device = next(model.parameters()).device
    there = batch.to(device)
    with high_precision(device):
        return model.hidden(there.tokens, there.segments)


class _States(dict[str, Tensor]):
    """Reduces the recorded inputs of sublayers and the final norm immediately to max |h| and Σ|h| by dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0.0
        self.total: Tensor | None = None

    def __setitem__(self, name: str, value: Tensor) -> None:
        if not name.endswith(".input"):
            return
        size = value.detach().abs().flatten(end_dim=-2)
        self.peak = max(self.peak, float(size.max()))
        total = size.double().sum(0)
        self.total = total if self.total is None else self.total + total


def outlier_facts(model: Decoder, batches: Iterable[Batch]) -> tuple[float, float]:
    """Return peak activation and residual-sink ratio. The first is the largest |h| that any sublayer reads. The second
    is the mean |h| over tokens and depth of the largest dimension, divided by the median dimension's. `residua
    diagnose` uses the same definitions."""
    states = _States()
    with taps.record(states):
        for batch in batches:
            forward(model, batch)
    assert states.total is not None
    return states.peak, float(gauges.relative_sizes(states.total).max())


class _Sums:
    """Sums of one module's rounding errors over all tokens."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        weights: Mapping[str, Quantized],
        scheme: Scheme,
        scales: Mapping[str, float],
    ) -> None:
        exact = matrices(module)
        low = [weights[f"{name}{end}"].dequantize() for end in exact]
        activations = [scheme.rounding(scales.get(activation)) for activation in inputs(name, module)]
        self.exact = in_low_precision(module, list(exact.values()), Tensor.float)
        self.parts = {
            "output": in_low_precision(module, low, activations),
            "weight": in_low_precision(module, low, Tensor.float),
            "activation": in_low_precision(module, list(exact.values()), activations),
        }
        self.name, self.activation = name, activations[0]
        self.first = (module.up.detach() if isinstance(module, Experts) else exact[""]).float()
        self.errors = dict.fromkeys((*self.parts, "signal"), 0.0)
        self.peak = self.first.new_zeros(self.first.shape[1])
        self.spread = self.peak.double()
        self.inner = 0.0

    def note(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, *rest = arguments
        x = x.detach().float().flatten(end_dim=-2)
        if not len(x):
            return
        with no_autocast(x):
            y = self.exact(x, *rest)
            for part, rounded in self.parts.items():
                self.errors[part] += float((rounded(x, *rest) - y).double().square().sum())
            self.errors["signal"] += float(y.double().square().sum())
            self.peak = torch.maximum(self.peak, x.abs().amax(0))
            if isinstance(module, Experts):
                self.inner = max(self.inner, float(expert_states(module, x, *rest).abs().max()))
            self.spread += (self.activation(x) - x).double().square().sum(0)

    def result(self) -> ModuleError:
        signal = max(self.errors["signal"], 1e-300)
        relative = {key: (value / signal) ** 0.5 for key, value in self.errors.items()}
        return ModuleError(
            name=self.name,
            shape=(self.first.shape[0], self.first.shape[1]),
            error=relative["output"],
            weight_error=relative["weight"],
            activation_error=relative["activation"],
            input_peak=float(self.peak.max()),
            inner_peak=self.inner or None,
            outliers=self._outliers(),
        )

    def _outliers(self) -> tuple[Outlier, ...]:
        """The largest input channels, and each one's share of the output error that rounding the activations causes."""
        harm = self.spread * self.first.double().square().sum(0)
        share = harm / harm.sum().clamp(min=1e-300)
        median = self.peak.median().clamp(min=1e-30)
        largest = self.peak.topk(min(OUTLIERS_SHOWN, len(self.peak))).indices.tolist()
        return tuple(
            Outlier(channel=j, peak=float(self.peak[j]), ratio=float(self.peak[j] / median), share=float(share[j]))
            for j in largest
        )


def module_errors(
    model: Decoder,
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, Quantized],
    scheme: Scheme,
    batches: Iterable[Batch],
    scales: Mapping[str, float],
) -> list[ModuleError]:
    """Measure each module's error when it alone is rounded, on its inputs in the unquantized model.

    error = ‖x̂Ŵᵀ − xWᵀ‖ / ‖xWᵀ‖ over all tokens; its parts round only the weight or only the activations. `scales`
    holds the scales of a static scheme.
    """
    sums = {name: _Sums(name, module, weights, scheme, scales) for name, module in modules.items()}
    with hooked(lambda: [modules[n].register_forward_pre_hook(partial(_Sums.note, s)) for n, s in sums.items()]):
        for batch in batches:
            forward(model, batch)
    return [total.result() for total in sums.values()]


def largest_inputs(model: Decoder, modules: Mapping[str, nn.Module], batches: Iterable[Batch]) -> dict[str, float]:
    """Measure the largest magnitude of every activation that these modules round (`inputs`), over the batches."""
    peaks = {activation: 0.0 for name, module in modules.items() for activation in inputs(name, module)}

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, *rest = arguments
        x = x.detach().float().flatten(end_dim=-2)
        if not len(x):
            return
        tensors = [x, expert_states(module, x, *rest)] if isinstance(module, Experts) else [x]
        for activation, value in zip(inputs(name, module), tensors, strict=True):
            peak = float(value.abs().max())
            if not math.isfinite(peak):
                raise UserError(
                    f"an input of {activation} is {peak}: the model overflows on its calibration text, so use "
                    "other text or weights."
                )
            peaks[activation] = max(peaks[activation], peak)

    with hooked(lambda: [m.register_forward_pre_hook(partial(note, name)) for name, m in modules.items()]):
        for batch in batches:
            forward(model, batch)
    return peaks


def static_scales(model: Decoder, scheme: Scheme, batches: Iterable[Batch]) -> dict[str, float]:
    """Calibrate the scales of a static scheme by activation on these batches; empty for a dynamic scheme."""
    if scheme.static is None:
        return {}
    return {name: static_scale(peak) for name, peak in largest_inputs(model, targets(model), batches).items()}


@dataclass
class Evaluation:
    """A model on its device, with its evaluation text. Between calls, all modules are in high precision."""

    model: Decoder
    scheme: Scheme
    exempt: tuple[str, ...]
    text: CalibrationText
    validation: list[Batch]
    progress: StageProgress

    def __post_init__(self) -> None:
        self.originals = targets(self.model)
        self.names = list(targets(self.model, self.exempt))
        self.peaks: dict[str, float] = {}

    @cached_property
    def weights(self) -> dict[str, Quantized]:
        """All matrices in low precision, computed on first use, which must come after smoothing."""
        return quantize_weights(self.originals, self.scheme)

    @property
    def chosen(self) -> dict[str, Quantized]:
        """The quantized matrices of the modules that are not exempt."""
        ends = {name: matrices(self.originals[name]) for name in self.names}
        return {f"{name}{end}": self.weights[f"{name}{end}"] for name in self.names for end in ends[name]}

    @property
    def scales(self) -> dict[str, float]:
        """The scales of activations from calibration; empty in a dynamic scheme."""
        return {name: static_scale(peak) for name, peak in self.peaks.items()}

    def loss(self, stage: str, low: Iterable[str] = ()) -> float:
        """Return the loss with the named modules in low precision."""
        exact = {name: self.originals[name] for name in low}
        total = len(self.validation)
        ticks = iter(range(1, total + 1))
        if exact:
            install(self.model, rounded(exact, self.weights, self.scheme, self.scales))
        try:
            loss = mean_loss(self.model, self.validation, lambda: self.progress(stage, next(ticks), total))
        finally:
            install(self.model, exact)
        if not math.isfinite(loss):
            raise UserError(f"{stage} is {loss}: the model or its rounded copy overflows on this text.")
        return loss

    def smooth(self, alpha: float, sequences: int, inside: bool) -> float:
        """Calibrate and fold SmoothQuant's factors; return the loss afterwards, still in high precision."""
        batches = self._calibration("calibrating", sequences)
        smooth(self.model, batches, alpha, inside=inside, run=partial(forward, self.model))
        return self.loss("loss after folding")

    def round_kept(self, dtype: torch.dtype) -> None:
        """Round unquantized tensors to `dtype`, as a folder stores them. Call this after smoothing, which changes
        weights."""
        _ = self.weights  # quantized first: `findings` quantizes the exempt modules too
        with torch.no_grad():
            for name, tensor in model_tensors(self.model).items():
                if tensor.is_floating_point() and not is_rounded(name, self.names):
                    tensor.copy_(tensor.to(dtype))

    def calibrate(self, sequences: int) -> None:
        """Measure the activation ranges that a static scheme needs, after smoothing and in high precision."""
        if self.scheme.static is not None:
            batches = self._calibration("calibrating scales", sequences)
            self.peaks = largest_inputs(self.model, self.originals, batches)

    def _calibration(self, stage: str, sequences: int) -> Iterator[Batch]:
        done = 0
        for batch in self.text.calibration(sequences):
            yield batch
            done += len(batch.tokens)
            self.progress(stage, done, sequences)

    def findings(self, probes: int) -> dict[str, Any]:
        """The measurements in low precision, as fields of `QuantizationResult`."""
        after = self.loss("loss in low precision", self.names)
        errors = self._errors()
        worst = [module.name for module in sorted(errors, key=lambda module: -module.error)]
        stays = unquantized(self.model, self.names)
        return {
            "loss_after": after,
            "loss_without_exemptions": self.loss("loss with nothing exempt", self.originals) if self.exempt else None,
            "modules": tuple(errors),
            "probes": tuple(self._probe(name, after) for name in worst[:probes]),
            "kept": tuple(stays),
            "bytes_after": 4 * sum(tensor.parameters for tensor in stays) + _stored(self.chosen.values()),
        }

    def unsmoothed(self, inside: bool) -> Iterator[str]:
        """Yield quantized modules with a matrix that SmoothQuant did not reach."""
        smoothed = {id(reader) for edge in edges(self.model, inside=inside) for reader in edge.readers}
        for name in self.names:
            if any(id(parameter) not in smoothed for parameter in self.originals[name].parameters()):
                yield name

    def _errors(self) -> list[ModuleError]:
        few = self.text.validation(min(ERROR_TOKENS, sum(batch.tokens.numel() for batch in self.validation)))
        self.progress("error by module", 0, len(few))
        modules = {name: self.originals[name] for name in self.names}
        return module_errors(self.model, modules, self.weights, self.scheme, few, self.scales)

    def _probe(self, module: str, after: float) -> Probe:
        loss = self.loss(f"loss without {module}", [name for name in self.names if name != module])
        return Probe(module=module, loss=loss, gain=after - loss)


def _stored(weights: Iterable[Quantized]) -> int:
    """Bytes of codes and scales."""
    total = 0
    for weight in weights:
        codes_per_byte = 2 if weight.codes.dtype is torch.uint8 else 1
        scales = [part for part in weight[1:] if isinstance(part, torch.Tensor)]
        total += weight.codes.numel() // codes_per_byte + sum(s.numel() * s.element_size() for s in scales)
    return total
