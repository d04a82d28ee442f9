"""Statistics of a trained model for reports, from one forward and backward pass with the model's taps recorded.

Written to `inspection.json`. Sections whose taps the model does not have are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from residua.data.loader import Batch
from residua.model import gauges, taps

if TYPE_CHECKING:
    from residua.model.decoder import Decoder

SEQUENCES = 4


def inspect_model(model: Decoder, batch: Batch) -> dict[str, Any]:
    """Magnitudes, gradients, depth weights and gates on a few sequences of a batch, in fp32."""
    device = next(model.parameters()).device
    tokens, targets = batch.tokens[:SEQUENCES].to(device), batch.targets[:SEQUENCES].to(device)
    segments = None if batch.segments is None else batch.segments[:SEQUENCES].to(device)
    model.zero_grad(set_to_none=True)
    with taps.record() as seen:
        model.losses(tokens, targets, segments=segments)[0].backward()
    found = {
        "tokens": tokens.numel(),
        "sublayers": _sublayers(model, seen),
        "depth_weights": _depth_weights(seen),
        "gates": _gates(seen),
        "beta": _betas(seen),
        "experts": _experts(seen),
    }
    model.zero_grad(set_to_none=True)
    return {name: section for name, section in found.items() if section}


def _sublayers(model: Decoder, seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Per sublayer: the RMS of its output and of its parameters' gradients."""
    return [
        {
            "sublayer": k,
            "output_rms": _rms([output]),
            "gradient_rms": _rms([p.grad for p in model.sublayers[k].parameters() if p.grad is not None]),
        }
        for k, output in _numbered(seen, r"sublayer\.(\d+)\.output")
    ]


def _depth_weights(seen: dict[str, Tensor]) -> dict[str, Any]:
    """The mean weight of each source at each read: row r is the read after sublayer `readers[r]`."""
    reads = list(_numbered(seen, r"depth\.(\d+)\.weights"))
    return {"readers": [k for k, _ in reads], "mean": [_mean_over_tokens(w) for _, w in reads]} if reads else {}


def _gates(seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Per layer: the mean of the attention gate, and the share of it that is nearly closed."""
    return [
        {"layer": k, "mean": float(gate.float().mean()), "closed": float(gauges.closed(gate).float().mean())}
        for k, gate in _numbered(seen, r"attention\.(\d+)\.gate")
    ]


def _betas(seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Per gated sublayer: how much of its output each stream takes in, on average."""
    return [{"sublayer": k, "mean": _mean_over_tokens(beta)} for k, beta in _numbered(seen, r"depth\.(\d+)\.beta")]


def _experts(seen: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Per mixture: the share of the choices that each expert got."""
    return [{"layer": k, "load": load.tolist()} for k, load in _numbered(seen, r"moe\.(\d+)\.load")]


def _numbered(seen: dict[str, Tensor], pattern: str) -> Iterator[tuple[int, Tensor]]:
    """The taps whose names match, sorted by the number in the name."""
    matches = [(int(match[1]), tensor) for name, tensor in seen.items() if (match := re.fullmatch(pattern, name))]
    for number, tensor in sorted(matches, key=lambda pair: pair[0]):
        yield number, tensor.detach()


def _mean_over_tokens(values: Tensor) -> list[float]:
    mean: list[float] = values.float().flatten(end_dim=-2).mean(0).tolist()
    return mean


def _rms(tensors: list[Tensor]) -> float:
    """The root mean square over all elements together."""
    squares = torch.stack([t.double().square().sum() for t in tensors]).sum()
    return float((squares / sum(t.numel() for t in tensors)).sqrt())
