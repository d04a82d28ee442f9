"""Working copies of the matrices, rounded once per step, and gradients that add up where they are made.

Autocast rounds each float32 master for every micro-batch, and autograd reads and writes each gradient once more to add
it to those of earlier micro-batches. Here the model is run on copies in the products' dtype, refreshed when a step
begins; a copy's backward pass adds its gradient to a float32 buffer, which a compiler does where it brings the product
to float32 anyway. The same numbers, with less traffic. Autograd does not see the masters, so hooks on those are silent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from residua.model.projection import Projection


class WorkingCopies:
    """Copies of the trained weights of all projections of a model: what autocast would round and nothing else.

    Each has a gradient in every step, zero if no pass has used it: a projection that is not for every step must not be
    among them. Of one weight under several names the first stands for all.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        owners = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Projection)}
        names = {id(owner.weight): name for name, owner in reversed(owners.items()) if owner.weight.requires_grad}
        self._masters = {name: owners[name].weight for name in reversed(names.values())}
        masters = self._masters.values()
        self._copies = [torch.empty_like(m, dtype=dtype, requires_grad=False) for m in masters]
        self._gradients = [torch.empty_like(m, requires_grad=False) for m in masters]
        # what autograd sees as the origin of the copies, so that their backward pass is run
        self._origin = next(iter(masters)).new_zeros(()).requires_grad_() if self._masters else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the masters as they are now."""
        if self._masters:
            torch._foreach_copy_(self._copies, list(self._masters.values()))

    def begin(self) -> None:
        """Start a step: fresh copies, and gradients of zero with the masters."""
        self.refresh()
        if self._masters:
            torch._foreach_zero_(self._gradients)
        for master, gradient in zip(self._masters.values(), self._gradients, strict=True):
            master.grad = gradient

    def run(self, module: nn.Module, prefix: str, *args: Any, **settings: Any) -> Any:
        """Call a module in which the model is found under `prefix`, on the copies."""
        pairs = zip(self._masters, self._copies, self._gradients, strict=True)
        weights = {prefix + name: self._placed(name, copy, total) for name, copy, total in pairs}
        return functional_call(module, weights, args, settings)

    def _placed(self, name: str, copy: Tensor, total: Tensor) -> Tensor:
        """What stands in the place of a weight during a call."""
        return adding_up(self._origin, copy, total)


class _AddingUp(torch.autograd.Function):
    """A copy whose gradient is added to a buffer."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, copy: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(total)
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        (total,) = ctx.saved_tensors
        total.add_(g.to(total.dtype))
        return None, None, None


def adding_up(origin: Tensor | None, copy: Tensor, total: Tensor) -> Tensor:
    out: Tensor = _AddingUp.apply(origin, copy, total)
    return out


class Entry(nn.Module):
    """A function of a model as a module, which is what tensors can be put into for one call."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._function = function

    def forward(self, *args: Any, **settings: Any) -> Any:
        return self._function(*args, **settings)
