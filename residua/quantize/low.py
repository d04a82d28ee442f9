"""Modules in low precision: they hold rounded weights and round their activations.

Products of the rounded values are computed in fp32, like a kernel with exact products and fp32 accumulation. The
result has the same dtype as that of the original module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from residua.model.moe import Experts, expert_states
from residua.model.projection import Projection
from residua.ops import grouped_linear
from residua.ops._runtime.numeric import no_autocast, working_dtype

Round = Callable[[Tensor], Tensor]
Matrices = dict[str, Tensor]


def matrices(module: nn.Module) -> Matrices:
    """The matrices [R, C] of a module by the suffix of their name: one, or two per expert."""
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
    """The names of the activations that a module rounds: its input, and in experts that of their last matrices."""
    return (name, f"{name}.out") if isinstance(module, Experts) else (name,)


def in_low_precision(
    module: nn.Module, weights: Sequence[Tensor], activations: Round | Sequence[Round], label: str = ""
) -> nn.Module:
    """The module with these weights, in the order of `matrices`, and rounded activations.

    `activations` are in the order of `inputs`, or one for all.
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
    """The experts of a mixture; each expert's weights were rounded separately."""

    def __init__(self, experts: Experts, weights: Sequence[Tensor], activation: Round, inner: Round) -> None:
        super().__init__()
        self.activation, self.inner = activation, inner
        self.count, self.kind = experts.count, experts.kind
        up, out = torch.cat(list(weights[: self.count])), torch.cat(list(weights[self.count :]))
        self.up, self.out = (nn.Parameter(stack, requires_grad=False) for stack in (up, out))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        with no_autocast(x):
            h = expert_states(self, self.activation(x), ends)
            y: Tensor = grouped_linear(self.inner(h), self.out.float().unflatten(0, (self.count, -1)), ends)
        return y.to(working_dtype(x))
