"""Quantize a model: replace its large matrices by modules that round weights and activations.

These are every `Projection` (the linear maps of attention, feed-forward and anchors) and the experts of a mixture. The
embedding, the head, norms, gates, routers and the depth operators stay in high precision.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import nn

from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.moe import Experts
from residua.model.projection import Projection
from residua.quantize.low import in_low_precision, inputs, matrices
from residua.quantize.schemes import Quantized, Scheme

ALWAYS_KEPT = ("*.gates", "*.decay", "*.gamma.down", "*.gamma.up")
"""Small maps that control others (decay, mixing): cheap in high precision, and rounding them is costly."""


@dataclass(frozen=True)
class Kept:
    """A tensor that stays in high precision, and why."""

    name: str
    shape: tuple[int, ...]
    reason: str

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that has large matrices, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Projection | Experts)}


def targets(model: nn.Module, exempt: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules to quantize: all candidates except those in `ALWAYS_KEPT` or matched by an `exempt` pattern."""
    found, patterns = candidates(model), tuple(exempt)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in found):
            examples = ", ".join(list(found)[:3])
            raise UserError(f"--exempt {pattern!r} matches no module of this model; examples of names: {examples}.")
    return {name: module for name, module in found.items() if not _matches(name, (*ALWAYS_KEPT, *patterns))}


def kept(model: Decoder, quantized: Iterable[str]) -> list[Kept]:
    """Every parameter that stays in high precision, with the reason."""
    low, large = set(quantized), candidates(model)
    return [
        Kept(name, tuple(parameter.shape), _reason(name, large))
        for name, parameter in model.named_parameters()
        if not is_rounded(name, low)
    ]


def is_rounded(name: str, modules: Container[str]) -> bool:
    """Whether a parameter is a matrix of one of these modules; biases stay in high precision."""
    module, _, own = name.rpartition(".")
    return module in modules and own != "bias"


def quantize_weights(modules: Mapping[str, nn.Module], scheme: Scheme) -> dict[str, Quantized]:
    """The quantized matrices of modules by name; raises ValueError for one that is not finite."""
    return {
        f"{name}{end}": scheme.weight(matrix, what=f"{name}{end}")
        for name, module in modules.items()
        for end, matrix in matrices(module).items()
    }


def rounded(
    modules: Mapping[str, nn.Module],
    weights: Mapping[str, Quantized],
    scheme: Scheme,
    scales: Mapping[str, float] | None = None,
) -> dict[str, nn.Module]:
    """Low-precision replacements of these modules, with these weights.

    `scales` are those of their inputs (`low.inputs`) from calibration, for a static scheme.
    """
    return {
        name: in_low_precision(
            module,
            [weights[f"{name}{end}"].dequantize() for end in matrices(module)],
            [scheme.rounding((scales or {}).get(activation)) for activation in inputs(name, module)],
            scheme.name,
        )
        for name, module in modules.items()
    }


def install(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Replace the modules of these names."""
    for name, module in modules.items():
        model.set_submodule(name, module)


@torch.no_grad()
def quantize_model(
    model: nn.Module, scheme: Scheme, exempt: Iterable[str] = (), scales: Mapping[str, float] | None = None
) -> dict[str, Quantized]:
    """Quantize a model in place; returns the quantized matrices by name.

    A static scheme needs `scales`, which `residua.quantize.static_scales` measures.
    """
    modules = targets(model, exempt)
    weights = quantize_weights(modules, scheme)
    install(model, rounded(modules, weights, scheme, scales))
    return weights


def _reason(name: str, large: Container[str]) -> str:
    module = name.rpartition(".")[0]
    if name.startswith("topology."):
        return "depth operator"
    if module in large:
        return "small and steers others" if _matches(module, ALWAYS_KEPT) else "exempted"
    return "embedding or head" if name.startswith(("embed.", "unembed.")) else "norm, gate, router or scale"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
