"""Example inputs of an operator, part of its declaration.

`residua doctor` and `bench ops` call operators with them. So do the tests that compare fused paths with references, and
the compilation without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from operator import itemgetter
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from residua.ops._runtime.backend import Operator

INFERENCE = "inference"
"""A folder whose operators may have the same names as training's."""


@dataclass(frozen=True)
class Case:
    """Inputs of an operator. All floating-point tensors except the `fixed` ones get gradients.

    `only`: the one output to compare, if others differ between paths. `moved`: the fewest rows, tokens × width each,
    that the case must move, forward and backward. `in_place`: the argument that is overwritten, and counts as an
    output. `note`: the requirements of the fused path, in words.
    """

    args: Sequence[Any]
    settings: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    gradients: bool = True
    only: int | None = None
    fixed: Sequence[Tensor] = ()
    moved: tuple[float, float] | None = None
    in_place: int | None = None
    note: str = ""

    def leaves(self, dtype: torch.dtype | None = None) -> tuple[Sequence[Any], dict[str, Any], list[Tensor]]:
        """Arguments and settings of one call, cast to `dtype` if given, and the tensors that require gradients."""

        def leaf(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            wanted = self.gradients and not any(x is fixed for fixed in self.fixed)
            return x.detach().to(dtype or x.dtype, copy=True).requires_grad_(wanted)

        args, settings = tree_map_only(Tensor, leaf, (tuple(self.args), self.settings))
        return args, settings, [x for x in tree_leaves((args, settings)) if isinstance(x, Tensor) and x.requires_grad]

    def results(self, run: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The outputs of a function on these inputs, and their gradients for random probes, the same in every call."""
        args, settings, leaves = self.leaves(dtype)
        with torch.set_grad_enabled(self.gradients):
            values = run(*args, **settings)
        outputs = [x for x in tree_leaves(values if self.only is None else values[self.only]) if isinstance(x, Tensor)]
        if not self.gradients:
            return outputs if self.in_place is None else [*outputs, *tree_leaves(args[self.in_place])]
        outputs = [x for x in outputs if x.requires_grad]
        source = torch.Generator().manual_seed(1)
        probes = [torch.randn(x.shape, generator=source).to(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, leaves, probes, allow_unused=True)
        return [*outputs, *(g for g in gradients if g is not None)]

    def is_fused(self, operator: Operator[..., Any]) -> bool:
        """Whether a call with these inputs takes the fused path."""
        with torch.set_grad_enabled(self.gradients):
            return operator.fuses(*self.args, **self.settings)


Cases = Iterable[Case]


def declared_operators() -> dict[str, Operator[..., Any]]:
    """Every operator by name; those for inference are prefixed with their folder."""
    folders = import_module("residua.ops")
    operators: dict[str, Operator[..., Any]] = {}
    for folder in sorted(module.name for module in iter_modules(folders.__path__) if module.ispkg):
        package = import_module(f"residua.ops.{folder}")
        for name, value in sorted(vars(package).items(), key=itemgetter(0)):
            if isinstance(value, Operator) and value.folder == package.__name__:
                operators[f"{folder}.{name}" if folder == INFERENCE else name] = value
    return operators


def example_cases(
    device: torch.device, dtype: torch.dtype, sizes: Sizes | None = None
) -> Iterator[tuple[str, Operator[..., Any], Case]]:
    """Every example with its name and operator; each operator draws from its own random source."""
    for name, operator in declared_operators().items():
        for case in operator.cases(Draw(device, dtype, sizes)):
            yield f"{name}, {case.label}" if case.label else name, operator, case


@dataclass(frozen=True)
class Sizes:
    """One size for all operators. `sources` is for attention over depth, `length` is the sequence length."""

    tokens: int = 192
    width: int = 256
    heads: int = 4
    length: int = 1024
    streams: int = 4
    sources: int = 6
    rank: int = 16
    vocabulary: int = 1000
    experts: int = 16
    top_k: int = 3

    @property
    def batch(self) -> tuple[int, int]:
        """The number and length of sequences that hold the tokens."""
        return max(1, self.tokens // self.length), min(self.tokens, self.length)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Draw:
    """Random inputs: activations in the tested dtype, weights in float32.

    They are the same on every machine, or drawn on the device, which is faster; on `meta` they have no values.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sizes | None = None, *, same_everywhere: bool = True
    ) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes or Sizes()
        self._source = torch.Generator("cpu" if same_everywhere or device.type == "meta" else device).manual_seed(0)

    def x(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Activations; without a shape, one row per token."""
        return self.w(*(shape or (self.sizes.tokens, self.sizes.width)), scale=scale).to(self.dtype)

    def w(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Weights."""
        if self.device.type == "meta":
            return torch.empty(shape, device="meta")
        return (scale * torch.randn(shape, generator=self._source, device=self._source.device)).to(self.device)

    def linear(self, *shape: int) -> Tensor:
        """Weights of a linear map."""
        return self.w(*shape, scale=shape[-1] ** -0.5)

    def heads(self) -> Tensor:
        """Activations of all heads, [B, T, H, D]."""
        return self.x(*self.sizes.batch, self.sizes.heads, self.sizes.head_dim)

    def gain(self) -> Tensor:
        """A weight for each channel."""
        return self.w(self.sizes.width)

    def matrix(self, *shape: int) -> Tensor:
        """Weights of a linear map in the activations' dtype."""
        return self.linear(*shape).to(self.dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        """Random integers from 0 to bound − 1."""
        return torch.randint(bound, shape, generator=self._source, device=self._source.device).to(self.device)

    def thirds(self) -> Tensor:
        """The row ends of three groups of tokens; the second group is empty."""
        third, tokens = self.sizes.tokens // 3, self.sizes.tokens
        return torch.tensor([third, third, tokens], device=self.device, dtype=torch.int32)

    def positions(self) -> Tensor:
        return torch.arange(self.sizes.batch[1], device=self.device)

    @cached_property
    def table(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D/2] of rotary positions."""
        turned = self.positions()[:, None] / 10 ** torch.linspace(0, 4, self.sizes.head_dim // 2, device=self.device)
        return turned.cos(), turned.sin()
