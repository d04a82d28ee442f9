"""Modules in low precision: which modules are quantized, and their replacements.

The replacements hold rounded weights and round their activations. Products of the rounded values are computed in fp32,
like a kernel with exact products and fp32 accumulation. The result has the original module's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.errors import UserError
from residua.model.decoder import Decoder
from residua.model.moe import Experts, expert_biases, expert_states
from residua.model.projection import STEERING, Projection
from residua.ops import grouped_linear
from residua.ops._runtime.numeric import no_autocast, working_dtype
from residua.ops.expert_ffn.reference import biased_rows
from residua.quantize.result import UnquantizedTensor
from residua.quantize.schemes import Quantized, Scheme

Round = Callable[[Tensor], Tensor]
Matrices = dict[str, Tensor]


def matrices(module: nn.Module) -> Matrices:
    """The matrices [R, C] of a module by name suffix: one, or two per expert."""
    if isinstance(module, Experts):
        stacks = {"up": module.up, "out": module.out}
        return {
            f".{name}.{e}": matrix.detach()
            for name, stack in stacks.items()
            for e, matrix in enumerate(stack.chunk(module.count))
        }
    assert isinstance(module, Projection)
    return {"": module.weight.detach()}


def inputs(name: str, module: nn.Module) -> tuple[str, ...]:
    """The names of the activations that a module rounds: its input and, for experts, their last matrices' input."""
    return (name, f"{name}.out") if isinstance(module, Experts) else (name,)


def in_low_precision(
    module: nn.Module, weights: Sequence[Tensor], activations: Round | Sequence[Round], label: str = ""
) -> nn.Module:
    """Build the replacement of a module with these weights, in the order of `matrices`, and rounded activations.

    `activations` holds the roundings in the order of `inputs`, or one for all.
    """
    each = [activations] * 2 if callable(activations) else activations
    if isinstance(module, Experts):
        return LowExperts(module, weights, each[0], each[1])
    return LowProjection(weights[0], each[0], label, getattr(module, "bias", None))


class FixedPrecision(nn.Module):
    """A module that moves between devices but ignores dtype casts, which would round its weights again."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedPrecision:
        super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)
        return self


class LowProjection(FixedPrecision):
    """y = x̂ Ŵᵀ, plus a bias in high precision if the projection has one."""

    def __init__(self, weight: Tensor, activation: Round, label: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.activation, self.label = activation, label
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with no_autocast(x):
            y = linear(self.activation(x), self.weight.float(), None if self.bias is None else self.bias.float())
        return y.to(working_dtype(x))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}, {self.label}"


class LowExperts(FixedPrecision):
    """The experts of a mixture; each expert's weights are rounded separately."""

    def __init__(self, experts: Experts, weights: Sequence[Tensor], activation: Round, inner: Round) -> None:
        super().__init__()
        self.activation, self.inner = activation, inner
        self.count, self.kind = experts.count, experts.kind
        biases = (
            None if bias is None else nn.Parameter(bias.detach(), False) for bias in (experts.up_bias, experts.out_bias)
        )
        self.up_bias, self.out_bias = biases
        up, out = torch.cat(list(weights[: self.count])), torch.cat(list(weights[self.count :]))
        self.up, self.out = (nn.Parameter(stack, requires_grad=False) for stack in (up, out))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        with no_autocast(x):
            h = expert_states(self, self.activation(x), ends)
            y = grouped_linear(self.inner(h), self.out.float().unflatten(0, (self.count, -1)), ends)
            y = biased_rows(y, expert_biases(self).get("out_bias"), ends)
        return y.to(working_dtype(x))


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that has large matrices, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Projection | Experts)}


def targets(model: nn.Module, exempt: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The modules to quantize: all candidates except those in `STEERING` or matched by an `exempt` pattern."""
    modules, patterns = candidates(model), tuple(exempt)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            examples = ", ".join(list(modules)[:3])
            raise UserError(f"--exempt {pattern!r} matches no module of this model; examples of names: {examples}.")
    return {name: module for name, module in modules.items() if not _matches(name, (*STEERING, *patterns))}


def unquantized(model: Decoder, quantized: Iterable[str]) -> list[UnquantizedTensor]:
    """List every parameter that stays in high precision, with the reason."""
    low, large = set(quantized), candidates(model)
    return [
        UnquantizedTensor(
            name=name, shape=tuple(parameter.shape), parameters=parameter.numel(), reason=_reason(name, large)
        )
        for name, parameter in model.named_parameters()
        if not is_rounded(name, low)
    ]


def is_rounded(name: str, modules: Container[str]) -> bool:
    """Return whether a parameter is a matrix of one of these modules; biases stay in high precision."""
    module, _, attribute = name.rpartition(".")
    return module in modules and not attribute.endswith("bias")


def quantize_weights(modules: Mapping[str, nn.Module], scheme: Scheme) -> dict[str, Quantized]:
    """Quantize the matrices of modules, by name; raise ValueError if one is not finite."""
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
    """Build low-precision replacements of these modules, with these weights.

    `scales` holds the scales of their inputs (`inputs`) from calibration, for a static scheme.
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
    """Replace the named modules."""
    for name, module in modules.items():
        model.set_submodule(name, module)


@torch.no_grad()
def quantize_model(
    model: nn.Module, scheme: Scheme, exempt: Iterable[str] = (), scales: Mapping[str, float] | None = None
) -> dict[str, Quantized]:
    """Quantize a model in place; return the quantized matrices by name.

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
        return "small and controls others" if _matches(module, STEERING) else "exempted"
    table = name.startswith(("embed.", "unembed.")) or name.endswith(".table.weight")
    return "embedding or head" if table else "norm, gate, router or scale"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
