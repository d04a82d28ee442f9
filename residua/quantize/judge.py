"""Evaluate a model in high and in low precision, as a whole and module by module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from residua.data.loader import Batch
from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.quantize.apply import install, is_rounded, kept, quantize_weights, rounded, targets
from residua.quantize.calibration import CalibrationText
from residua.quantize.graph import edges
from residua.quantize.low import matrices
from residua.quantize.measure import forward, largest_inputs, mean_loss, module_errors
from residua.quantize.nvfp4 import static_scale
from residua.quantize.schema import ERROR_TOKENS, KeptTensor, ModuleError, Probe
from residua.quantize.schemes import Quantized, Scheme
from residua.quantize.smoothing import smooth
from residua.report.terminal import StageProgress
from residua.storage.checkpoint import model_tensors


@dataclass
class Judge:
    """A model on its device with its evaluation text. Between calls, all modules are in high precision."""

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
        """All matrices in low precision. Computed on first use, which must come after smoothing."""
        return quantize_weights(self.originals, self.scheme)

    @property
    def chosen(self) -> dict[str, Quantized]:
        """The quantized matrices of the modules that are not exempt."""
        ends = {name: matrices(self.originals[name]) for name in self.names}
        return {f"{name}{end}": self.weights[f"{name}{end}"] for name in self.names for end in ends[name]}

    @property
    def scales(self) -> dict[str, float]:
        """The scales of activations from calibration; none in a dynamic scheme."""
        return {name: static_scale(peak) for name, peak in self.peaks.items()}

    def loss(self, stage: str, low: Iterable[str] = ()) -> float:
        """The loss with the modules of these names in low precision."""
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
        """Calibrate and fold SmoothQuant's factors; returns the loss afterwards, still in high precision."""
        batches = self._calibration("calibrating", sequences)
        smooth(self.model, batches, alpha, inside=inside, run=partial(forward, self.model))
        return self.loss("loss after folding")

    def round_kept(self, dtype: torch.dtype) -> None:
        """Round what is not quantized to `dtype`, as a folder in it has it. After smoothing: that changes weights."""
        _ = self.weights  # quantized first: `findings` quantizes the exempt modules too
        with torch.no_grad():
            for name, tensor in model_tensors(self.model).items():
                if tensor.is_floating_point() and not is_rounded(name, self.names):
                    tensor.copy_(tensor.to(dtype))

    def calibrate(self, sequences: int) -> None:
        """Measure the ranges of activations that a static scheme needs, after smoothing and in high precision."""
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
        stays = kept(self.model, self.names)
        return {
            "loss_after": after,
            "loss_without_exemptions": self.loss("loss with nothing exempt", self.originals) if self.exempt else None,
            "modules": tuple(errors),
            "probes": tuple(self._probe(name, after) for name in worst[:probes]),
            "kept": tuple(KeptTensor(**vars(tensor), parameters=tensor.parameters) for tensor in stays),
            "bytes_after": 4 * sum(tensor.parameters for tensor in stays) + _stored(self.chosen.values()),
        }

    def unsmoothed(self, inside: bool) -> Iterator[str]:
        """Quantized modules with a matrix that SmoothQuant did not reach."""
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
