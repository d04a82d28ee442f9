"""SmoothQuant (arXiv 2211.10438): divide activations and multiply weights by channel, so that both round well.

    s_j = max|X_j|^α / max|W_j|^(1−α),   X_j ← X_j / s_j,   W_j ← W_j · s_j

X_j is an input channel over the calibration text, W_j its column in all linear maps that read it. The division is
folded into the producer of X along the model's edges, which its parts declare (`residua.model.equivalence`). So the
smoothed model has the same modules and computes the same function. A norm that gates its own output also reads it:
GatedNorm's `down` is a reader inside the producer, and omitting it would change the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from residua.data.loader import Batch
from residua.errors import UserError
from residua.model.body import Sublayer
from residua.model.decoder import Decoder
from residua.model.equivalence import Edge
from residua.model.taps import hooked

LARGEST_FACTOR = 1e4


def smooth(
    model: Decoder,
    batches: Iterable[Batch],
    alpha: float = 0.5,
    *,
    inside: bool = False,
    run: Callable[[Batch], object] | None = None,
) -> dict[str, Tensor]:
    """Calibrate on `batches` and fold the factors; return them by edge.

    This smooths the outputs of norms, as in the paper, and with `inside` also the inputs of each sublayer's last
    matrix. `run` is the forward pass, by default the model's.
    """
    pairs = edges(model, inside=inside)
    peaks = channel_peaks(model, pairs, batches, run or partial(_forward, model))
    factors = {}
    for edge in pairs:
        factors[edge.name] = smoothing_factors(edge, peaks[edge.name], alpha)
        edge.fold(factors[edge.name])
    return factors


@torch.no_grad()
def channel_peaks(
    model: Decoder, pairs: Iterable[Edge], batches: Iterable[Batch], run: Callable[[Batch], object]
) -> dict[str, Tensor]:
    """Measure max|X_j| of every edge's vector over the batches, [C] in fp32."""
    peaks: dict[str, Tensor] = {}

    def note(edge: Edge, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        h = edge.look(*arguments)
        projected = torch.stack([h] if isinstance(h, Tensor) else [h.q, h.k, h.v])
        rows = projected.detach().flatten(end_dim=-2)
        peak = rows.abs().amax(0).float() if len(rows) else rows.new_zeros(rows.shape[1]).float()
        peaks[edge.name] = torch.maximum(peaks[edge.name], peak) if edge.name in peaks else peak

    with hooked(lambda: [edge.probe.register_forward_pre_hook(partial(note, edge)) for edge in pairs]):
        for batch in batches:
            run(batch)
    return peaks


def smoothing_factors(edge: Edge, peaks: Tensor, alpha: float) -> Tensor:
    """Compute s for the producer's channels; 1 if a channel is always zero or has no reader."""
    largest = [reader.detach().abs().amax(0).float() for reader in edge.readers]
    columns = torch.stack([pad(each, (0, len(edge.channel) - len(each))) for each in largest]).amax(0)
    peaks, columns = (_shared(values, edge.channel) for values in (peaks, columns))
    factors = peaks**alpha / columns ** (1 - alpha)
    usable = (peaks > 0) & (columns > 0)
    return torch.where(usable, factors, torch.ones_like(factors)).clamp(1 / LARGEST_FACTOR, LARGEST_FACTOR)


def _shared(values: Tensor, channel: Tensor) -> Tensor:
    """The largest value among the channels that share a producer's channel."""
    shared = values.new_zeros(int(channel.max()) + 1)
    return shared.scatter_reduce(0, channel.to(values.device), values, "amax")


def _forward(model: Decoder, batch: Batch) -> Tensor:
    return model.hidden(batch.tokens, batch.segments)


def edges(model: Decoder, *, inside: bool = True) -> list[Edge]:
    """List the edges from a model's norms and, with `inside`, those within sublayers, in forward order."""
    pairs = []
    width = torch.arange(model.config.width)
    for k, sublayer in enumerate(cast(Iterable[Sublayer], model.sublayers)):
        body: Any = sublayer.body
        if not getattr(sublayer.norm, "fixed", False):  # a plugin's norm may be any module
            divide = stated(sublayer.norm, "divide", "how to divide its output per channel")
            pairs.append(Edge(f"sublayers.{k}.norm", readers(body), width, divide, body))
        if inside and hasattr(body, "inner_edges"):
            pairs += body.inner_edges(f"sublayers.{k}.body")
    return pairs


def readers(body: nn.Module) -> tuple[Tensor, ...]:
    """Every linear map that reads a sublayer's normed input."""
    weights: tuple[Tensor, ...] = stated(body, "readers", "which maps read its input")()
    return weights


def stated(module: nn.Module, name: str, what: str) -> Any:
    """Return a method of a module; if the module lacks it, refuse the module by name."""
    method = getattr(module, name, None)
    if method is None:
        raise UserError(f"{type(module).__name__} does not define {what}: add a method {name}().")
    return method
