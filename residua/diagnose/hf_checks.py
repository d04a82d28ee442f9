"""Guards: check our reading of a Hugging Face model against the model's own behaviour before reporting findings.

Everything that cannot be measured is explained under `skipped`, in diagnosis.json and on the page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residua.diagnose.hf_structure import Layer
from residua.diagnose.observe import Observation, Site
from residua.errors import UserError
from residua.ops._runtime.numeric import wide

_EXACT = (torch.float32, torch.float64)
LOSS_TOLERANCE, COARSE_LOSS_TOLERANCE = 2e-4, 2e-2
"""Mean |difference| of token losses over the mean loss that rounding can explain: in float32, and in 16 bits."""
SUM_TOLERANCE, COARSE_SUM_TOLERANCE = 1e-3, 5e-2
"""The same for states: the fraction of a layer's change that its sublayers' outputs do not explain."""
CAUSAL_TOLERANCE, COARSE_CAUSAL_TOLERANCE = 1e-4, 1e-2
"""The same for earlier tokens' logits when the last token changes; in most causal models they are bit-identical."""

NOT_ADDED = 1e-2
"""A part whose output is added with a factor smaller than this counts as writing nothing."""


def same_losses(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the per-token losses of two runs of one model differ by rounding only."""
    tolerance = LOSS_TOLERANCE if dtype in _EXACT else COARSE_LOSS_TOLERANCE
    return bool((ours - theirs).abs().mean() <= tolerance * theirs.mean().clamp(min=1))


@torch.no_grad()
def require_causal(model: Any, probe: Tensor) -> None:
    """Refuse a model whose logits depend on later tokens, as an encoder's do: it sees the tokens that it predicts."""
    changed = probe.clone()
    changed[:, -1] = probe[:, -2]
    before, after = (model(input_ids=tokens, use_cache=False).logits[:, :-1] for tokens in (probe, changed))
    tolerance = CAUSAL_TOLERANCE if before.dtype in _EXACT else COARSE_CAUSAL_TOLERANCE
    if float((wide(after) - wide(before)).norm()) > tolerance * float(wide(before).norm()):
        raise UserError(
            f"{type(model).__name__} also attends to later tokens, so its next-token loss is meaningless: "
            "diagnose a causal language model."
        )


@dataclass
class Checked:
    """The result of comparing the inputs and outputs of layers with those of their sublayers.

    wrong: layers in which some sublayer's state is not the layer's input plus earlier sublayers' outputs; unread: those
    of them whose first state is not even the layer's input; partial: layers whose change their sublayers' outputs do
    not fully explain; scales: by sublayer, the factor on its output, where it is not 1; returning: sublayers that
    return the layer's output, and so add the residual themselves; inner: parts whose output is never added and only
    prepares another part's input, as in a gated norm.
    """

    wrong: list[int] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    partial: list[int] = field(default_factory=list)
    scales: dict[int, float] = field(default_factory=dict)
    returning: list[int] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)


def check_layers(observation: Observation, sites: Sequence[Site], ends: Mapping[int, tuple[Tensor, Tensor]]) -> Checked:
    """Compare the states and outputs of one pass with each layer's input and output."""
    result = Checked()
    for layer, (start, returned) in ends.items():
        indices = [site.index for site in sites if site.layer == layer and site.kind != "layer"]
        if indices:
            _check_layer(result, layer, indices, observation, _exactly(start), _exactly(returned))
    return result


def _check_layer(
    result: Checked, layer: int, indices: list[int], observation: Observation, start: Tensor, end: Tensor
) -> None:
    if any(k not in observation.states or k not in observation.outputs for k in indices):
        result.wrong.append(layer)
        return
    exact = observation.outputs[indices[0]].dtype in _EXACT
    tolerance = SUM_TOLERANCE if exact else COARSE_SUM_TOLERANCE
    states = [_exactly(observation.states[k]) for k in indices]
    outputs = torch.stack([_exactly(observation.outputs[k]).flatten() for k in indices], 1)
    slack = 1e-5 * float(start.norm()) if exact else 1e-2 * float(start.norm())
    if float((states[0] - start).norm()) > slack:
        result.unread.append(layer)
        result.wrong.append(layer)
        return
    for place, state in enumerate(states):
        change = (state - start).flatten()
        if _unexplained(change, outputs[:, :place])[0] > tolerance * float(change.norm()) + slack:
            result.wrong.append(layer)
            return
    change = (end - start).flatten()
    allowed = tolerance * float(change.norm()) + slack
    if float((change - outputs.sum(1)).norm()) <= allowed:
        return
    if float((end.flatten() - outputs[:, -1]).norm()) <= slack:
        result.returning.append(indices[-1])
        return
    left, factors = _unexplained(change, outputs)
    if left > allowed:
        result.partial.append(layer)
        return
    factor = {k: c for k, c, output in zip(indices, factors, outputs.T, strict=True) if float(output.norm()) > slack}
    result.inner += [k for k in indices[:-1] if abs(factor.get(k, 1.0)) < NOT_ADDED]
    result.scales |= factor


def _exactly(x: Tensor) -> Tensor:
    return wide(x).double().cpu()


def _unexplained(change: Tensor, outputs: Tensor) -> tuple[float, list[float]]:
    """Return the norm of the change that no weighted sum of the outputs explains, and the least-squares weights."""
    weights = torch.zeros(outputs.shape[1], dtype=outputs.dtype)
    written = outputs.norm(dim=0) > 0
    if bool(written.any()):
        weights[written] = torch.linalg.lstsq(outputs[:, written], change[:, None]).solution[:, 0]
    return float((change - outputs @ weights).norm()), weights.tolist()


REASONS = {
    "hidden attention": "Attention metrics of layers {layers}: they bypass transformers' attention interface, so their "
    "attention cannot be observed.",
    "linear attention": "Attention metrics of layers {layers}: they use linear attention, which has no softmax "
    "weights.",
    "compressed keys": "Attention metrics of layers {layers}: they also attend to keys that each represent several "
    "tokens.",
    "whole layers": "Sublayers: some layers have no submodule that returns the hidden width, so each counts as one "
    "sublayer.",
    "several runs": "Earlier runs of layers {layers}: they run up to {runs} times per pass; everything except removal "
    "is measured in the last run.",
    "own residual": "Removal of single sublayers: sublayers add the residual themselves, so only whole layers are "
    "removed.",
    "streams": "Comparison of sublayers with their layer: layers carry several streams, so sublayer outputs do not "
    "add up to the change of a layer.",
    "uncounted experts": "Expert load of layers {layers}: their experts do not receive the indices of the chosen "
    "experts, so choices cannot be counted.",
    "wrong sublayers": "Sublayers of layers {layers}: the detected sublayers do not explain the states of their "
    "layer{where}; so each of these layers counts as one sublayer.",
    "partial sublayers": "Part of layers {layers}: their sublayers' outputs do not add up to the layer's change, "
    "so part of it happens elsewhere; only the removal of whole layers measures that part.",
    "unused tensors": "The folder's {tensors}: {model} has no such parameters and runs without them.",
}
"""Why something is not measured, by the obstacle."""


def reason(kind: str, layers: Collection[int] = (), **more: object) -> str:
    """Fill in a sentence of `REASONS` for these layers."""
    return REASONS[kind].format(layers=listed(layers), **more)


def not_measured(
    decoder: Sequence[Layer],
    sites: Sequence[Site],
    observation: Observation,
    blind: Collection[int],
    before: Sequence[str],
    carrying: bool,
) -> list[str]:
    """Explain which measurements a model's structure prevents. `blind`: the layers without attention weights; `before`:
    the reasons already known; `carrying`: whether some sublayers add the residual themselves."""
    explained = any(known.startswith("Attention") for known in before)
    again = {n: layer.runs for n, layer in enumerate(decoder) if layer.runs > 1}
    places: dict[str, Collection[int] | bool] = {
        "hidden attention": [] if explained else [s.layer for s in sites if s.kind == "attention" and s.layer in blind],
        "linear attention": [s.layer for s in sites if s.kind == "linear attention" and s.layer in blind],
        "whole layers": any(site.kind == "layer" and not decoder[site.layer].bodies for site in sites),
        "several runs": again,
        "own residual": carrying,
        "streams": bool(observation.streams),
        "uncounted experts": {s.layer for s in sites if s.kind == "mixture of experts"} - observation.loads.keys(),
    }
    runs = max(again.values(), default=1)
    reasons = [reason(kind, () if where is True else where, runs=runs) for kind, where in places.items() if where]  # type: ignore[arg-type]
    return [*reasons, "Depth weights, gates and anchors: published by Residua models only."]


def tensors(names: Sequence[str], most: int) -> str:
    """`tensor 'a'`, `tensors 'a', 'b'`; for more than `most`, `tensors 'a', 'b' and 5 more`."""
    shown = ", ".join(map(repr, names[:most]))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"tensor{'' if len(names) == 1 else 's'} {shown}{more}"


def listed(layers: Collection[int]) -> str:
    """`0, 1, 2, 4`; for more than twelve, the first, the last and the count."""
    unique = sorted(set(layers))
    return ", ".join(map(str, unique)) if len(unique) <= 12 else f"{unique[0]} to {unique[-1]} ({len(unique)} of them)"
