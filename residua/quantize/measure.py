"""What low precision costs: the loss of a whole model, and the error of each module on its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from residua.data.loader import IGNORED, Batch
from residua.errors import UserError
from residua.model import gauges, taps
from residua.model.decoder import Decoder
from residua.model.moe import Experts, expert_states
from residua.ops._runtime.numeric import no_autocast
from residua.quantize.apply import targets
from residua.quantize.low import in_low_precision, inputs, matrices
from residua.quantize.nvfp4 import static_scale
from residua.quantize.schema import ModuleError, Outlier
from residua.quantize.schemes import Quantized, Scheme
from residua.quantize.smoothing import hooked

OUTLIERS_SHOWN = 3


def high_precision(device: torch.device) -> AbstractContextManager[Any]:
    """The precision of a model that is not quantized: bf16 autocast on a GPU, as in training, and fp32 on a CPU."""
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
    """Reduces the inputs of sublayers and of the final norm as they are recorded: max |h|, and Σ|h| by dimension."""

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
    """Peak activation: the largest |h| that any sublayer reads. Residual-sink ratio: the largest dimension's mean |h|
    over tokens and depth, over the median dimension's (`residua diagnose` has the same definitions)."""
    states = _States()
    with taps.record(states):
        for batch in batches:
            forward(model, batch)
    assert states.total is not None
    return states.peak, float(gauges.relative_sizes(states.total).max())


class _Sums:
    """Sums of one module's rounding errors over all its tokens."""

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
        """The largest input channels, and each one's share of the output error from rounding the activations."""
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
    """The error of each module when only it is rounded, on its inputs in the unquantized model.

    error = ‖x̂Ŵᵀ − xWᵀ‖ / ‖xWᵀ‖ over all tokens; the parts round only the weight or only the activations. `scales` are
    those of a static scheme.
    """
    sums = {name: _Sums(name, module, weights, scheme, scales) for name, module in modules.items()}
    with hooked({name: (modules[name], partial(_Sums.note, found)) for name, found in sums.items()}):
        for batch in batches:
            forward(model, batch)
    return [found.result() for found in sums.values()]


def largest_inputs(model: Decoder, modules: Mapping[str, nn.Module], batches: Iterable[Batch]) -> dict[str, float]:
    """The largest magnitude of every activation that these modules round (`low.inputs`), over the batches."""
    peaks = {activation: 0.0 for name, module in modules.items() for activation in inputs(name, module)}

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, *rest = arguments
        x = x.detach().float().flatten(end_dim=-2)
        if not len(x):
            return
        seen = [x, expert_states(module, x, *rest)] if isinstance(module, Experts) else [x]
        for activation, value in zip(inputs(name, module), seen, strict=True):
            peak = float(value.abs().max())
            if not math.isfinite(peak):
                raise UserError(f"an input of {activation} is {peak}: the model overflows on its calibration text.")
            peaks[activation] = max(peaks[activation], peak)

    with hooked({name: (module, partial(note, name)) for name, module in modules.items()}):
        for batch in batches:
            forward(model, batch)
    return peaks


def static_scales(model: Decoder, scheme: Scheme, batches: Iterable[Batch]) -> dict[str, float]:
    """The scales of a static scheme by activation, calibrated on these batches; none for a dynamic one."""
    if scheme.static is None:
        return {}
    return {name: static_scale(peak) for name, peak in largest_inputs(model, targets(model), batches).items()}
