"""The structure of a Hugging Face decoder, found by running it once: layers, sublayers, norms and their gains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from residua.diagnose.hf_attention import watching
from residua.diagnose.interventions import first, hooked, on_each
from residua.diagnose.observe import Site
from residua.ops._runtime.numeric import rms, wide


@dataclass
class Layer:
    """One decoder layer: its module, the bodies of its sublayers in the order they run, and its norms."""

    module: nn.Module
    bodies: list[nn.Module]
    norms: list[nn.Module]


def main_input(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """What a module was given: its first argument, or `hidden_states` by name."""
    return given[0] if given else named.get("hidden_states", next(iter(named.values()), None))


def find_layers(model: nn.Module, probe: Tensor, width: int) -> tuple[list[Layer], dict[int, int]]:
    """The decoder layers, and the attention modules that use the interface with their number of heads."""
    shapes: dict[int, tuple[int, ...]] = {}
    order: list[int] = []

    def note(module: nn.Module, given: Any, output: Any) -> None:
        y = first(output)
        if isinstance(y, Tensor):
            shapes[id(module)] = tuple(y.shape)
            order.append(id(module))

    with torch.no_grad(), hooked(on_each(list(model.modules()), note)), watching() as watch:
        model(input_ids=probe, use_cache=False)
    keeps = {key for key, shape in shapes.items() if shape[:2] == tuple(probe.shape) and shape[-1] == width}
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) and all(id(x) in keeps for x in m)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of layers that keeps the hidden width {width}: it cannot be diagnosed."
        )
    chosen = max(lists, key=len)
    ranked = {key: index for index, key in enumerate(order)}
    return [_layer(module, keeps, ranked, width) for module in chosen], dict(watch.heads)


def _layer(module: nn.Module, keeps: set[int], ranked: dict[int, int], width: int) -> Layer:
    children = [child for child in module.children() if id(child) in keeps]
    bodies = [c for c in children if not is_norm(c, width) and any(p.dim() >= 2 for p in c.parameters())]
    norms = [c for c in children if is_norm(c, width)]
    return Layer(module, sorted(bodies, key=lambda body: ranked[id(body)]), norms)


def is_norm(module: nn.Module, width: int) -> bool:
    """Whether it has one gain per dimension. A norm may hold more, such as the matrices of a small gate."""
    gain = getattr(module, "weight", None)
    return isinstance(gain, Tensor) and tuple(gain.shape) == (width,) and not isinstance(module, nn.Linear)


def looks_like_attention(body: nn.Module) -> bool:
    """Whether it has projections called as those of attention are."""
    names = {name.rpartition(".")[2] for name, _ in body.named_modules()}
    fused = {"query_key_value", "qkv_proj", "c_attn", "Wqkv", "attn_qkv"}
    return bool(names & fused) or (bool(names & {"q_proj", "query"}) and bool(names & {"k_proj", "key"}))


def has_experts(body: nn.Module) -> bool:
    """Whether it has a list of equal modules, or parameters with an axis for experts."""
    lists = (m for m in body.modules() if isinstance(m, nn.ModuleList))
    repeated = any(len(m) > 1 and len({type(x) for x in m}) == 1 for m in lists)
    return repeated or any(p.dim() == 3 for p in body.parameters())


def acting_gains(
    model: nn.Module,
    decoder: list[Layer],
    final: nn.Module | None,
    bodies: list[nn.Module],
    sites: list[Site],
    probe: Tensor,
) -> dict[int, Tensor]:
    """By site, the factor that the norm before it applies to each dimension.

    It is found by regressing the norm's output on x/RMS(x), so gains stored as 1 + w, or scaled, come out as they act.
    """
    found: dict[int, Tensor] = {}
    normed: dict[int, tuple[Tensor, Tensor]] = {}

    def note_norm(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
        gain = _acting_gain(module, given[0], output)
        normed[id(output)] = (output, gain)
        if module is final:
            found[len(sites)] = gain

    def note_body(site: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        x = main_input(given, named)
        if isinstance(x, Tensor) and id(x) in normed:
            found[site] = normed[id(x)][1]

    norms = [norm for layer in decoder for norm in layer.norms] + ([final] if final is not None else [])
    handles = on_each(norms, note_norm)()
    handles += [
        body.register_forward_hook(partial(note_body, s.index), with_kwargs=True)
        for s, body in zip(sites, bodies, strict=True)
    ]
    with torch.no_grad(), hooked(lambda: handles):
        model(input_ids=probe, use_cache=False)
    return found


def _acting_gain(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x, y = wide(x).double(), wide(y).double()
    if isinstance(module, nn.LayerNorm):
        x = x - x.mean(-1, keepdim=True)
        y = y if module.bias is None else y - module.bias.double()
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", 1e-6))
    base = rms(x, eps if isinstance(eps, float) else 1e-6).flatten(0, -2)
    return (base * y.flatten(0, -2)).sum(0) / base.square().sum(0).clamp(min=1e-12)
